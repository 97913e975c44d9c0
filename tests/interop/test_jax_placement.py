"""Results are committed to a device where the array that went in was, and only there."""

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.ranks(1, 3, timeout=120, backends=["native"])

LARGE = 300_000  # elements: too many to share a message


def accumulated(group, tree):
    total = ss.Accumulator(group, group.size)
    total.add(tree, shard=group.rank)
    return total.mean()


def updates_of(wrap):
    def updates(group, x):
        optax = pytest.importorskip("optax")
        opt = wrap(group, optax.sgd(0.1))
        return opt.update([x], opt.init([x]), [x])[0]

    return updates


VERBS = {
    "allreduce": lambda group, x: group.allreduce(x),
    "iallreduce": lambda group, x: group.iallreduce(x).wait(),
    "reduce": lambda group, x: group.reduce(x),
    "bcast": lambda group, x: group.bcast(x, group.size - 1),
    "allgather": lambda group, x: group.allgather(x),
    "allgatherv": lambda group, x: group.allgatherv(x),
    "gather": lambda group, x: group.gather(x),
    "reduce_scatter": lambda group, x: group.reduce_scatter(jnp.stack([x] * group.size)),
    "alltoall": lambda group, x: group.alltoall(jnp.stack([x] * group.size)),
    "alltoallv": lambda group, x: group.alltoallv(x, [len(x)] + [0] * (group.size - 1))[0],
    "tree": lambda group, x: group.allreduce_tree([x, x[:0], x + 1], "avg"),
    "large tree": lambda group, x: group.allreduce_tree([jnp.broadcast_to(x[:1], LARGE), x]),
    "weight": lambda group, x: group.allreduce_tree([x], "avg", weight=group.rank + 1),
    "synchronize": lambda group, x: ss.synchronize(group, {"a": x, "b": x + 1}, root=group.size - 1),
    "accumulator": lambda group, x: accumulated(group, [x, x.astype("bfloat16")]),
    "DistributedOptimizer": updates_of(ss.DistributedOptimizer),
    "ShardedOptimizer": updates_of(ss.ShardedOptimizer),
    "gather_metrics": lambda group, x: ss.gather_metrics(group, [x]),
}


@pytest.mark.parametrize("committed", [False, True], ids=["uncommitted", "committed"])
@pytest.mark.parametrize("name", VERBS)
def test_results_are_placed_as_inputs(group, name, committed):
    x = jnp.ones(3)
    x = jax.device_put(x, jax.devices()[0]) if committed else x
    results = jax.tree.leaves(VERBS[name](group, x))
    assert results or name == "gather"
    assert [y.committed for y in results] == [committed] * len(results)


@pytest.mark.parametrize("committed", [False, True], ids=["uncommitted", "committed"])
def test_blocks_are_committed_where_the_array_was(group, committed):
    """Other ranks than root have no array."""
    rows = jnp.ones((group.size, 3))
    rows = jax.device_put(rows, jax.devices()[0]) if committed else rows
    given = rows if group.rank == 0 else None
    counts = [1] * group.size if group.rank == 0 else None
    for block in (group.scatter(given), group.iscatter(given).wait(), group.scatterv(given, counts)):
        assert block.committed == (committed and group.rank == 0)


def test_a_missing_gradient_is_uncommitted(group):
    x = jax.device_put(jnp.ones(3), jax.devices()[0])
    last = group.rank == group.size - 1
    (mean,) = ss.allreduce_gradients(group, [x if last else None])
    assert mean.committed == last


def test_an_accumulator_that_got_no_shard(group):
    """The containers go to ranks without a tree; devices, which cannot be pickled, do not."""
    total = ss.Accumulator(group)
    x = jax.device_put(jnp.full(3, 2.0), jax.devices()[0])
    if group.rank == 0:
        total.add([x])
    (mean,) = total.mean()
    np.testing.assert_array_equal(mean, np.full(3, 2.0))
    assert mean.committed == (group.rank == 0)


@pytest.mark.parametrize("name", VERBS)
def test_results_have_one_type_on_all_ranks(group, name):
    """Of arrays of Python numbers, too, whose type is weak: what root keeps is what the others receive."""
    results = jax.tree.leaves(VERBS[name](group, jnp.full(3, 1.0)))
    if name not in ("gather", "reduce"):  # which have a result at root only
        types = group.allgather_object([(str(y.dtype), y.weak_type) for y in results])
        assert types == types[:1] * group.size


KEEPING = {
    "allreduce": lambda group, x: group.allreduce(x, "max"),
    "iallreduce": lambda group, x: group.iallreduce(x, "min").wait(),
    "bcast": lambda group, x: group.bcast(x, group.size - 1),
    "allgather": lambda group, x: group.allgather(x),
    "allgatherv": lambda group, x: group.allgatherv(x),
    "tree": lambda group, x: group.allreduce_tree([x, x[:1]], "max"),
    "large tree": lambda group, x: group.allreduce_tree(
        [wide(lambda: jnp.broadcast_to(x[0], LARGE)), x], "max"
    ),
    "synchronize": lambda group, x: ss.synchronize(group, {"a": x}, root=group.size - 1),
    "accumulator": lambda group, x: accumulated(group, [x]),
}


def wide(make):
    enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with enable_x64(True):
        return make()


@pytest.mark.parametrize("weak", [False, True], ids=["", "of weak type"])
@pytest.mark.parametrize("name", KEEPING)
def test_what_was_made_with_64_bits_keeps_them(group, name, weak):
    number = 1 + 2.0**-40
    x = wide(lambda: jnp.full(3, number, *([] if weak else ["float64"])))
    for y in jax.tree.leaves(KEEPING[name](group, x)):
        assert y.dtype == "float64"
        assert (np.asarray(y) == number).all()
