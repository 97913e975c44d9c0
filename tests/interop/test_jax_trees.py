"""Trees of JAX: registered nodes, random keys, optax states."""

import numpy as np
import pytest
from samestep import trees

jax = pytest.importorskip("jax")


def test_registered_nodes_are_opened():
    @jax.tree_util.register_pytree_with_keys_class
    class Box:
        def __init__(self, content):
            self.content = content

        def tree_flatten_with_keys(self):
            return [(self_key("content"), self.content)], None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    self_key = jax.tree_util.GetAttrKey
    flat = trees.flatten([Box({"a": 1, "b": None})])
    assert flat.names == ["[0].content['a']", "[0].content['b']"]
    assert flat.rebuild([5, 6])[0].content == {"a": 5, "b": 6}


def test_arrays_are_leaves_and_random_keys_are_data():
    array = jax.numpy.ones(2)
    key = jax.random.key(3)
    flat = trees.flatten((array, key))
    assert flat.leaves[0] is array
    assert flat.leaves[1].dtype == np.uint32
    again = flat.rebuild(flat.leaves)[1]
    assert jax.random.key_impl(again) == jax.random.key_impl(key)
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(key))


def test_the_state_of_optax():
    optax = pytest.importorskip("optax")
    state = optax.adam(0.1).init({"w": jax.numpy.ones(2)})
    flat = trees.flatten(state)
    assert flat.names == ["[0].count", "[0].mu['w']", "[0].nu['w']"]
    assert jax.tree.structure(flat.rebuild(flat.leaves)) == jax.tree.structure(state)
