"""The face of FluxMPI.jl, with its meanings: global ranks, sums, in place."""

import re

import numpy as np
import pytest
import samestep as ss
from samestep import fluxmpi

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(autouse=True)
def world(group):
    return group


def test_init_again_does_nothing(world, capsys):
    fluxmpi.Init()
    fluxmpi.Init(verbose=True)
    assert fluxmpi.Initialized()
    assert fluxmpi.local_rank() == world.rank
    assert fluxmpi.total_workers() == world.size
    assert ("initialized" in capsys.readouterr().out) == (world.rank == 0)


def test_allreduce_with_sum_and_product(world):
    x = np.ones(5)
    assert fluxmpi.allreduce(x) is x
    np.testing.assert_array_equal(x, np.full(5, float(world.size)))
    np.testing.assert_array_equal(fluxmpi.allreduce(np.ones(5), "prod"), np.ones(5))


def test_the_forms_without_waiting(world):
    work = fluxmpi.Iallreduce(np.ones(5))
    other = fluxmpi.Ibcast(np.full(5, float(world.rank + 1)), world.size - 1)
    np.testing.assert_array_equal(work.wait(), np.full(5, float(world.size)))
    np.testing.assert_array_equal(other.wait(), np.full(5, float(world.size)))


def test_bcast_and_reduce(world):
    np.testing.assert_array_equal(fluxmpi.bcast(np.full(3, float(world.rank + 1))), np.ones(3))
    x = np.full(3, 2.0)
    fluxmpi.reduce(x, "sum", 0)
    np.testing.assert_array_equal(x, np.full(3, 2.0 * world.size if world.rank == 0 else 2.0))


def test_gradients_are_summed(world):
    got = fluxmpi.allreduce_gradients({"a": np.ones(2), "b": (np.ones(1),)})
    np.testing.assert_array_equal(got["a"], np.full(2, float(world.size)))
    np.testing.assert_array_equal(got["b"][0], np.full(1, float(world.size)))


def test_the_optimizer_sums(world):
    class Descent:
        def init(self, params):
            return ()

        def update(self, grads, state, params=None):
            return [-0.1 * g for g in grads], state

    plain, wrapped = Descent(), fluxmpi.DistributedOptimizer(Descent())
    got, _ = wrapped.update([np.ones(2)], wrapped.init(None))
    want, _ = plain.update([np.full(2, float(world.size))], ())
    np.testing.assert_allclose(got[0], want[0])


def test_synchronize_and_data(world):
    got = fluxmpi.synchronize({"a": np.full(2, float(world.rank))}, root_rank=world.size - 1)
    np.testing.assert_array_equal(got["a"], np.full(2, world.size - 1.0))
    assert sum(world.allgather_object(len(fluxmpi.DistributedDataContainer(range(10))))) == 10


def test_printing(world, capsys):
    fluxmpi.fluxmpi_println("epoch ", 3)
    fluxmpi.fluxmpi_print("a", world.rank)
    text = capsys.readouterr().out
    if world.rank:
        assert text == ""
    else:
        assert text.count("\n") == world.size
        assert all(f"[{rank} / {world.size}] epoch 3\n" in text for rank in range(world.size))
        assert re.search(rf"\[0 / {world.size}\] a0", text)


def test_cuda_aware_mpi_is_never_used():
    assert fluxmpi.disable_cudampi_support() is None


def test_it_needs_no_more_than_the_package():
    assert fluxmpi.DistributedDataContainer(range(3)).__class__ is ss.DistributedDataContainer
