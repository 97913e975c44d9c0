"""Modules of equinox: trees with arrays and functions."""

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
