"""Modules of equinox: trees with arrays and functions."""

import dataclasses
import warnings

import numpy as np
import pytest
import samestep as ss

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")


@pytest.mark.ranks(2, timeout=180, backends=["native"])
def test_a_module_is_synchronized_without_a_warning(group):
    make = {"activation": jax.nn.relu, "final_activation": lambda x: x}
    model = eqx.nn.MLP(2, 3, 4, 2, **make, key=jax.random.key(group.rank))
    want = eqx.nn.MLP(2, 3, 4, 2, **make, key=jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ss.synchronize(group, model)
    assert got.activation is jax.nn.relu
    arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (got, want)]
    for mine, roots in zip(*arrays, strict=True):
        np.testing.assert_array_equal(mine, roots)
    np.testing.assert_array_equal(got(np.ones(2, "f4")), want(np.ones(2, "f4")))


class Layer(eqx.Module):
    weight: jax.Array
    rate: float = eqx.field(static=True)
    unknown: object = eqx.field(static=True)


@pytest.mark.ranks(3, timeout=180, backends=["native"])
@pytest.mark.parametrize("weight", [None, 1.0])
def test_static_fields_that_differ_are_named_on_all_ranks(group, weight):
    is_last = group.rank == group.size - 1
    equal, other = (Layer(jax.numpy.ones(3), rate, object()) for rate in (0.5, 0.5 + is_last))
    calls = [
        lambda layer: ss.synchronize(group, {"l": layer}),
        lambda layer: ss.allreduce_gradients(group, {"l": layer}, weight=weight),
        lambda layer: jax.jit(
            lambda w: group.allreduce_tree({"l": eqx.tree_at(lambda m: m.weight, layer, w)})
        )(layer.weight),
        lambda layer: group.same({"l": (layer.weight, eqx.filter(layer, eqx.is_array))}),
    ]
    for call in calls:
        call(equal)
        with pytest.raises(
            ss.MismatchError,
            match=r"static data of .*\['l'\].* 0.5, .*on ranks 0, 1 and .* 1.5, .* on rank 2",
        ):
            call(other)


@pytest.mark.ranks(2, timeout=180, backends=["native"])
def test_static_arrays_and_records_are_compared_by_value(group):
    @dataclasses.dataclass(frozen=True)
    class Options:
        sizes: tuple
        table: np.ndarray
        activation: object

    def layer(entry):
        return Layer(jax.numpy.ones(1), 0.5, Options((1, 2), np.full(3, entry), lambda x: x))

    group.allreduce_tree(layer(1.0))
    with pytest.raises(ss.MismatchError, match="static data of the top is"):
        group.allreduce_tree(layer(float(group.rank)))
