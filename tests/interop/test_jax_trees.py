"""Trees of JAX: registered nodes, random keys, optax states."""

import numpy as np
import pytest
import samestep as ss
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


@pytest.mark.ranks(3, backends=["native"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_random_keys_of_other_generators_are_refused(group, compiled):
    def take(key):
        return ss.synchronize(group, {"key": key})["key"]

    take = jax.jit(take) if compiled else take
    same = take(jax.random.key(group.rank, impl="rbg"))
    np.testing.assert_array_equal(jax.random.key_data(same), np.zeros(4))
    is_last = group.rank == group.size - 1
    with pytest.raises(ss.MismatchError, match=r"is .*rbg.* on ranks 0, 1 and .*(unsafe_|u)rbg.* on rank 2"):
        take(jax.random.key(0, impl="unsafe_rbg" if is_last else "rbg"))


@pytest.mark.ranks(1, 3, backends=["native"])
@pytest.mark.parametrize(
    "value", [np.array([0, 2**40]), np.int64(-(2**40)), 2**40, np.array([1e300]), np.uint64(2**63)], ids=repr
)
def test_constants_that_a_program_would_cut_are_refused_on_all_ranks(group, value):
    small = type(value)(1) if not isinstance(value, np.ndarray) else np.ones_like(value)
    is_last = group.rank == group.size - 1

    def reduced(tree):
        return jax.jit(lambda x: group.allreduce_tree({**tree, "x": x}))(np.ones(2, "f4"))

    np.testing.assert_array_equal(
        reduced({"c": small, "f": np.array([0.1, np.inf])})["c"], small * group.size
    )
    with pytest.raises(
        ss.InvalidArgumentError, match=r"leaf \['c'\].* does not fit .*, to which jit cuts it"
    ):
        reduced({"c": value if is_last else small})
    with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['c'\].* does not fit"):
        jax.jit(lambda x: ss.synchronize(group, {"c": value if is_last else small, "x": x}))(np.ones(2, "f4"))


@pytest.mark.ranks(1, 3, backends=["native"])
def test_arrays_of_64_bits_are_sent_in_objects_as_they_are(group):
    made = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with made(True):
        mine = jax.numpy.asarray(np.array([2**40 + group.rank]))
        exact = jax.numpy.asarray(np.array([1 / 3]))
    last = group.size - 1
    got = group.bcast_object({"n": [mine], "x": (exact, None)}, root=last)
    assert got["n"][0].dtype == np.int64
    np.testing.assert_array_equal(np.asarray(got["n"][0]), [2**40 + last])
    np.testing.assert_array_equal(np.asarray(got["x"][0]), [1 / 3])
    np.testing.assert_array_equal(
        [int(np.asarray(n)[0]) for n in group.allgather_object(mine)], 2**40 + np.arange(group.size)
    )
    state = ss.TrainState(group, n=mine, undo=True)
    for step in state.steps(steps=1):
        with pytest.raises(ss.StepError), step:
            raise ZeroDivisionError
        break
    np.testing.assert_array_equal(np.asarray(state.n), [2**40])
