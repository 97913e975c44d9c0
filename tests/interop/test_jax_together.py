"""Programs compiled by JAX in blocks that all ranks leave together, also if one raises while they run."""

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.ranks(1, 2, 3, timeout=180, backends=["native"])
BUSY = 300  # extents of a matrix whose powers let JAX go on in the background


def programs(group):
    def slow(x):
        power = jnp.full((BUSY, BUSY), 1.0 / BUSY)
        for _ in range(8):
            power = power @ power
        return group.allreduce(x + 0 * power[0, 0])

    return {
        "sum": group.allreduce,
        "tree": lambda x: group.allreduce_tree({"x": x})["x"],
        "gathered": lambda x: group.allgather(x).sum(0),
        "gradient": jax.grad(lambda x: group.allreduce(x * x / 2).sum()),
        "slow": slow,
    }


@pytest.mark.parametrize("name", ["sum", "tree", "gathered", "gradient", "slow"])
def test_the_same_program_runs_after_a_rank_has_raised(group, name):
    compiled = jax.jit(programs(group)[name])
    seen = []
    for step in range(6):
        guilty = step % group.size if step % 2 else None
        try:
            with group.together():
                if guilty == group.rank:
                    raise ValueError("in this block")
                result = compiled(jnp.full(3, 2.0**group.rank))
        except ss.StepError as error:
            assert (error.rank, error.kind) == (guilty, "ValueError")
            assert (error.__cause__ is not None) or group.rank != guilty
        else:
            seen.append(np.asarray(result).tolist())
    sums = [2.0**group.size - 1] * 3
    expected = [2.0**group.rank * group.size] * 3 if name == "gradient" else sums
    assert seen == [expected] * 3


def test_a_block_waits_for_its_programs(group):
    """Their results are there on all ranks, or on none: an array of the state may be one of them."""
    compiled = jax.jit(programs(group)["slow"])
    with group.together():
        compiled(jnp.ones(3))
    with pytest.raises(ss.StepError, match="MismatchError"), group.together():
        compiled(jnp.ones(3 + group.rank))
        if group.size == 1:
            raise ss.MismatchError("as there are no others")
    with group.together():
        result = compiled(jnp.ones(3))
    assert result.tolist() == [float(group.size)] * 3
