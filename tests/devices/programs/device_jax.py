"""Programs of test_device_jax.py, with the stand-in of JAX."""

import json
import os
import sys

import fake_arrays
import fake_jax
import numpy as np
from device_rank import attempt, rank, release_soon, report, size, start


def values(r, count):
    return (np.arange(count) % 97 + r).astype("float32")


def use_jax_arrays(backend):
    """Results are new arrays; nothing is allocated or waited for that JAX's pool and a stream can give."""
    count, wrong = 1001, 0
    with fake_jax.installed(), start(backend) as world:
        for turn in range(6):
            if turn == 3:
                before, waited = fake_arrays.slow_calls(), fake_jax.Array.waits_on_host
            x = fake_jax.late(values(rank, count))
            y = world.allreduce(x)
            wrong += type(y) is not fake_jax.Array
            wrong += not np.array_equal(y.get(), sum(values(r, count) for r in range(size)))
            wrong += not np.array_equal(x.get(), values(rank, count))
            whole = world.allgather(x)
            wrong += not np.array_equal(whole.get(), np.stack([values(r, count) for r in range(size)]))
            tree = world.allreduce_tree({"a": fake_jax.late(values(rank, 7)), "b": x}, "max")
            wrong += not np.array_equal(tree["a"].get(), values(size - 1, 7))
            del y, whole, tree
        after = fake_arrays.slow_calls()
        report(
            wrong=wrong,
            allocated=after.allocated - before.allocated,
            waits_on_host=fake_jax.Array.waits_on_host - waited,
        )


def begin_before_the_input_is_computed(backend):
    with fake_jax.installed(), start(backend) as world:
        out = fake_arrays.Array.of(np.zeros(1000, "float32"), fake_arrays.Stream())
        world.allreduce(fake_jax.late(values(rank, 1000), 0), out=out)
        x = fake_jax.late(values(rank, 1000), None)
        work = world.iallreduce(x, out=out)  # if it waited for the input, it would not return
        release_soon(fake_jax.compute())
        work.wait()
        del x  # XLA gives its memory to the next array
        fake_jax.late(np.full(1000, -1.0, "float32"), 0)
        expected = sum(values(r, 1000) for r in range(size))
        report(right=bool(np.array_equal(out.get(), expected)))


def begin_without_an_output_before_the_input_is_computed(backend):
    """XLA also fills the new array behind the input."""
    with fake_jax.installed(), start(backend) as world:
        world.allreduce(fake_jax.late(values(rank, 1000), 0))
        world.allgather(fake_jax.late(values(rank, 1000), 0))
        x = fake_jax.late(values(rank, 1000), None)
        works = [world.iallreduce(x), world.iallgather(x)]
        waiting = not any(work.done() for work in works)
        release_soon(fake_jax.compute())
        total, gathered = (work.wait() for work in works)
        del x
        everyone = [values(r, 1000) for r in range(size)]
        right = np.array_equal(total.get(), sum(everyone)) and np.array_equal(gathered.get(), everyone)
        report(waiting=waiting, right=right, arrays=type(total) is type(gathered) is fake_jax.Array)


def scatter_to_new_arrays(backend):
    """They are all that the operation has of JAX on ranks other than root, and are complete when they are handed on."""
    with fake_jax.installed(), start(backend) as world:
        rows = np.stack([values(r, 1000) for r in range(size)])
        wrong = 0
        for _ in range(5):
            block = world.scatter(fake_jax.late(rows, 2000) if rank == 0 else None)
            wrong += not np.array_equal(block.get(), values(rank, 1000))
        report(wrong=wrong)


def donate_inputs(backend):
    """An input whose memory JAX may write to once the operation has read it."""
    with fake_jax.installed(), start(backend) as world:
        wrong = 0
        for _ in range(5):
            x = fake_jax.late(values(rank, 1000), 2000)
            work = world.iallreduce(x)
            y = fake_jax.donate(x, np.full(1000, -1.0, "float32"))
            del x
            fake_jax.late(np.full(1000, -2.0, "float32"), 0)  # in memory that is free
            wrong += not np.array_equal(work.wait().get(), sum(values(r, 1000) for r in range(size)))
            wrong += not (y.get() == -1.0).all()
            x = fake_jax.late(values(rank, 1000), 2000)
            got = world.reduce(x, root=0)  # which other ranks only read
            fake_jax.donate(x, np.full(1000, -3.0, "float32"))
            wrong += rank == 0 and not np.array_equal(got.get(), sum(values(r, 1000) for r in range(size)))
        report(wrong=wrong)


def find_the_device(jax_is_first, user_says):
    """Two ranks with arrays of JAX that say nothing of devices."""
    with fake_jax.installed():
        if user_says:
            fake_jax.CONFIG.update("jax_cuda_visible_devices", user_says)
        if jax_is_first:
            fake_jax.devices()
        world = start("nccl", only=not jax_is_first and not user_says)
        x = fake_jax.late(values(rank, 10))
        attempt(lambda: world.allreduce(x).get().tolist() == sum(values(r, 10) for r in range(size)).tolist())
        report(seen=[d.local_hardware_id for d in fake_jax.devices()], used=x.device.local_hardware_id)
        os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
