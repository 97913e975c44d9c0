"""`synchronize`: everybody gets root's tree, in few messages, or everybody learns which leaf differs."""

import collections
import contextlib
import dataclasses
import functools
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


class AdamState(NamedTuple):
    step: int
    first: dict
    second: dict


@dataclasses.dataclass
class Block:
    weight: np.ndarray
    rate: float
    name: None = None


def filled(rank, shape=(3,), dtype="f8"):
    return np.full(shape, rank + 1, dtype)


def assert_all(value, expected, dtype="f8"):
    assert value.dtype == dtype
    np.testing.assert_array_equal(value, np.full(value.shape, expected, dtype))


@pytest.fixture(params=[0, -1], ids=["first", "last"])
def root(request, group):
    return request.param % group.size


def test_nested_dicts(group, root):
    tree = {"a": {"b": filled(group.rank), "c": filled(group.rank, 4)}, "d": filled(group.rank, (2, 3))}
    got = ss.synchronize(group, tree, root=root)
    for leaf in (got["a"]["b"], got["a"]["c"], got["d"]):
        assert_all(leaf, root + 1)


def test_leaves_that_can_be_written_are_written_and_returned(group, root):
    tree = [filled(group.rank), filled(group.rank, 1 << 18, "f4")]
    got = group.synchronize(tree, root=root)
    assert got[0] is tree[0]
    assert got[1] is tree[1]
    assert_all(tree[0], root + 1)
    assert_all(tree[1], root + 1, "f4")


def test_the_state_of_an_optimizer(group, root):
    moments = [{"w": filled(group.rank), "b": [filled(group.rank), filled(group.rank)]} for _ in range(2)]
    got = ss.synchronize(group, AdamState(group.rank, *moments), root=root)
    assert type(got) is AdamState
    assert got.step == root
    for moment in (got.first, got.second):
        for leaf in (moment["w"], *moment["b"]):
            assert_all(leaf, root + 1)


def test_the_state_of_a_stateless_optimizer(group):
    assert ss.synchronize(group, ()) == ()
    assert ss.synchronize(group, {"a": [], "b": {}}) == {"a": [], "b": {}}
    assert ss.synchronize(group, None) is None


def test_a_flat_vector_whose_parts_have_names(group, root):
    flat = filled(group.rank, 10)
    weight, bias = flat[:6].reshape(2, 3), flat[6:]
    ss.synchronize(group, flat, root=root)
    assert_all(weight, root + 1)
    assert_all(bias, root + 1)


def test_nested_tuples_and_other_containers(group, root):
    tree = (
        filled(group.rank),
        (filled(group.rank), [collections.deque([filled(group.rank)], maxlen=3)]),
        Block(filled(group.rank), float(group.rank)),
        collections.OrderedDict(z=filled(group.rank), a=group.rank),
        {1: filled(group.rank), "1": group.rank},
    )
    got = ss.synchronize(group, tree, root=root)
    assert_all(got[0], root + 1)
    assert_all(got[1][0], root + 1)
    assert got[1][1][0].maxlen == 3
    assert_all(got[1][1][0][0], root + 1)
    assert type(got[2]) is Block
    assert_all(got[2].weight, root + 1)
    assert got[2].rate == root
    assert list(got[3]) == ["z", "a"]
    assert got[3]["a"] == root
    assert_all(got[4][1], root + 1)
    assert got[4]["1"] == root


def test_none_stays_none(group):
    assert ss.synchronize(group, {"a": None, "b": [None, 1]}) == {"a": None, "b": [None, 1]}


@pytest.mark.parametrize("kind", [int, float, complex, bool, np.float32, np.int8, np.bool_])
def test_numbers_take_the_value_of_root_and_keep_their_type(group, root, kind):
    got = ss.synchronize(group, [kind(group.rank % 2)], root=root)[0]
    assert type(got) is kind
    assert got == kind(root % 2)


def test_an_integer_of_any_size(group, root):
    assert ss.synchronize(group, 10 ** (50 + group.rank), root=root) == 10 ** (50 + root)


class Estimator:
    """Holds arrays where nobody looks for them."""

    def __init__(self, rank):
        self.coef_ = filled(rank)

    def predict(self, x):
        return x @ self.coef_


def warnings_of(group, tree):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = ss.synchronize(group, tree)
    assert all(warning.filename == __file__ for warning in caught)
    return got, [str(warning.message) for warning in caught]


@pytest.mark.ranks(2, 3)
def test_objects_are_left_with_one_warning_that_names_them(group):
    tree = {"name": f"rank {group.rank}", "how": len, "model": Estimator(group.rank), "x": filled(group.rank)}
    got, reported = warnings_of(group, tree)
    assert got["name"] == f"rank {group.rank}"
    assert got["how"] is len
    assert_all(got["x"], 1)
    assert_all(got["model"].coef_, group.rank + 1)
    [text] = reported
    assert "['model'] (Estimator), ['name'] (str);" in text
    assert "['how']" not in text


SAME_EVERYWHERE = {
    "a function": len,
    "a lambda": lambda x: x,
    "a function with settings": functools.partial(filled, shape=(2,)),
    "a ufunc": np.tanh,
    "a class": Estimator,
    "a class method": dict.fromkeys,
    "text": "relu",
    "bytes": b"relu",
    "a choice": ss.ReduceOp.AVG,
}


class WithAttributes(dict):
    """Opened, unless an attribute holds an array."""


class Users(collections.UserList):
    """Likewise."""


@pytest.mark.parametrize("inner", [WithAttributes, Users])
def test_containers_of_arrays_that_cannot_be_opened_are_refused(group, inner):
    held = inner({"w": filled(group.rank)} if inner is WithAttributes else [filled(group.rank)])
    held.name = "encoder"
    ss.synchronize(group, {"layer": held})
    assert group.allreduce(held["w" if inner is WithAttributes else 0][:1])[0] == group.size
    held.cache = filled(group.rank)
    with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['layer'\].* arrays in other attributes"):
        ss.synchronize(group, {"layer": held})
    sent = ss.synchronize(group, {"layer": held}, objects="pickle")["layer"]
    assert sent.cache[0] == 1


def test_functions_and_texts_that_are_the_same_on_all_ranks_are_no_news(group):
    got, reported = warnings_of(group, {**SAME_EVERYWHERE, "x": filled(group.rank)})
    assert not reported
    assert all(got[name] is leaf for name, leaf in SAME_EVERYWHERE.items())
    assert_all(got["x"], 1)


DIFFERENT = {
    "functions": lambda rank: (np.tanh, np.sin)[rank % 2],
    "settings": lambda rank: functools.partial(filled, rank),
    "settings that are objects": lambda _: functools.partial(filled, object()),
    "methods of an object": lambda rank: Estimator(rank).predict,
    "texts": str,
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_may_differ_is_named(group, kind):
    _, reported = warnings_of(group, {"f": DIFFERENT[kind](group.rank), "x": filled(group.rank)})
    [text] = reported
    assert "left as on each rank: ['f'] (" in text


def test_an_object_alone_is_no_tree(group):
    model = Estimator(group.rank)
    got, reported = warnings_of(group, model)
    assert got is model
    [text] = reported
    assert f"synchronize: {__name__}.Estimator is not a tree of arrays, so nothing was synchronized" in text
    assert "objects='pickle'" in text
    assert_all(ss.synchronize(group, model, objects="pickle").coef_, 1)


@pytest.mark.parametrize("dtype", ["U3", "S3"])
def test_arrays_of_texts_are_objects(group, dtype):
    names = np.array([f"a{group.rank}", "b"], dtype)
    expected = (
        pytest.warns(UserWarning, match="left as on each rank")
        if group.size > 1
        else contextlib.nullcontext()
    )
    with expected:
        kept = ss.synchronize(group, {"names": names, "w": filled(group.rank)})
    assert kept["names"] is names
    assert_all(kept["w"], 1)
    sent = ss.synchronize(group, {"names": names}, objects="pickle")["names"]
    assert sent.tolist() == np.array(["a0", "b"], dtype).tolist()


def test_objects_can_be_sent(group, root):
    tree = {"name": f"rank {group.rank}", "raw": bytes([group.rank]), "path": {group.rank}}
    got = ss.synchronize(group, tree, root=root, objects="pickle")
    assert got == {"name": f"rank {root}", "raw": bytes([root]), "path": {root}}


def test_awkward_arrays(group, root):
    frame = filled(group.rank, (6, 4))
    fixed = filled(group.rank)
    fixed.flags.writeable = False
    tree = {
        "empty": np.zeros((0, 3)),
        "scalar": filled(group.rank, ()),
        "transposed": frame[:4].T,
        "every other": frame[4:, ::2],
        "fortran": np.asfortranarray(filled(group.rank, (2, 3), "f4")),
        "fixed": fixed,
        "half": filled(group.rank, 5, "f2"),
        "flags": np.array([group.rank == root, False]),
        "small": filled(group.rank, 3, "i1"),
        "large and strided": filled(group.rank, (2, 1 << 18), "f4").T,
    }
    got = ss.synchronize(group, tree, root=root)
    assert got["empty"].shape == (0, 3)
    for name in (
        "scalar",
        "transposed",
        "every other",
        "fortran",
        "fixed",
        "half",
        "small",
        "large and strided",
    ):
        assert_all(got[name], root + 1, tree[name].dtype)
    np.testing.assert_array_equal(got["flags"], [True, False])
    assert (got["fixed"] is fixed) == (group.rank == root)
    assert_all(fixed, group.rank + 1)
    assert_all(frame[4:, 1::2], group.rank + 1)


def test_shared_leaves_stay_shared(group, root):
    weight = filled(group.rank)
    got = ss.synchronize(group, {"embed": weight, "head": [weight, weight[:]]}, root=root)
    assert got["embed"] is got["head"][0] is weight
    assert_all(got["head"][1], root + 1)
    assert np.shares_memory(got["head"][1], weight)


def test_sharing_of_arrays_that_are_replaced_is_as_at_root(group):
    """Root has loaded a checkpoint, in which two leaves are no longer one."""
    fixed = filled(group.rank)
    fixed.flags.writeable = False
    other = filled(10)
    other.flags.writeable = False
    got = ss.synchronize(group, [fixed, other if group.rank == 0 else fixed])
    assert_all(got[0], 1)
    assert_all(got[1], 11)


@pytest.mark.ranks(2, 3)
def test_sharing_of_arrays_that_are_written_must_agree(group):
    weight, other = filled(group.rank), filled(group.rank)
    tree = {"a": weight, "b": other if group.rank == 0 else weight}
    with pytest.raises(ss.MismatchError, match=r"leaf \['b'\].*the array \['a'\] again on rank"):
        ss.synchronize(group, tree)


def test_a_tree_of_200_leaves_costs_a_handful_of_messages(group):
    tree = {f"layer {i}": filled(group.rank, 2500, "f4") for i in range(200)}
    ss.synchronize(group, tree)
    before = group.counters().operations
    ss.synchronize(group, tree)
    assert group.counters().operations - before <= 8


@pytest.mark.parametrize("shares", ["root", "the others", "everybody"])
def test_leaves_in_shared_memory(group, root, shares):
    mine = shares == "everybody" or (shares == "root") == (group.rank == root)
    tree = [group.empty(n, "f4") if mine else np.empty(n, "f4") for n in (0, 1, 70_001, 33_000)]
    for turn in range(2):
        for leaf in tree:
            leaf.fill(10 * turn + group.rank)
        ss.synchronize(group, tree, root=root)
        for leaf in tree:
            assert_all(leaf, 10 * turn + root, "f4")


def test_more_than_one_bucket(group, root):
    tree = [filled(group.rank, 100_000 + i, "f4" if i % 3 else "i8") for i in range(40)]
    for leaf in ss.synchronize(group, tree, root=root):
        assert_all(leaf, root + 1, leaf.dtype)


DIFFERENCES = {
    "shape": (
        lambda odd: {"a": np.zeros(3 + odd)},
        r"leaf \['a'\] is float64 \(3,\) on ranks? 0.*float64 \(4,\)",
    ),
    "dtype": (lambda odd: {"a": np.zeros(3, "f4" if odd else "f8")}, r"leaf \['a'\] is float64.*float32"),
    "name": (lambda odd: {"b" if odd else "a": 1}, r"leaf \['a'\] is a number on ranks? 0.*missing on rank"),
    "length": (lambda odd: [1] * (2 + odd), r"leaf \[2\] is missing on ranks? 0.*a number on rank"),
    "none": (
        lambda odd: (None if odd else np.zeros(2),),
        r"leaf \[0\] is float64 \(2,\) on ranks? 0.*None on rank",
    ),
    "kind": (
        lambda odd: 1.0 if odd else np.zeros(()),
        r"leaf at the top is float64 \(\) on ranks? 0.*a number on",
    ),
    "object": (
        lambda odd: ["x" if odd else 1],
        r"leaf \[0\] is a number on ranks? 0.*neither array nor number on",
    ),
    "order": (
        lambda odd: collections.OrderedDict([("b", 1), ("a", 2)][:: -1 if odd else 1]),
        r"the leaves are ordered \['b'\], \['a'\] on ranks? 0",
    ),
}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_difference_raises_everywhere_and_names_the_leaf(group, kind):
    make, text = DIFFERENCES[kind]
    tree = make(odd=group.rank == group.size - 1)
    with pytest.raises(ss.MismatchError, match=text) as caught:
        ss.synchronize(group, tree)
    assert f"on rank {group.size - 1}" in str(caught.value)
    texts = group.allgather_object(str(caught.value))
    assert len(set(texts)) == 1
    assert_all(ss.synchronize(group, filled(group.rank)), 1)


@pytest.mark.ranks(2, 3)
def test_nothing_is_written_when_trees_differ(group):
    tree = {"a": filled(group.rank), "b": np.zeros(2 + group.rank)}
    with pytest.raises(ss.MismatchError):
        ss.synchronize(group, tree)
    assert_all(tree["a"], group.rank + 1)


@pytest.mark.ranks(2, 3)
def test_roots_must_agree(group):
    with pytest.raises(ss.MismatchError, match=r"synchronize\(root=0.*on rank 0 and synchronize\(root=1"):
        ss.synchronize(group, filled(group.rank), root=min(group.rank, 1))


@pytest.mark.parametrize("root", [-1, 4, 1000])
def test_a_root_outside_the_group(group, root):
    with pytest.raises(ss.InvalidArgumentError, match=rf"root {root} is outside \[0, {group.size}\)"):
        ss.synchronize(group, filled(group.rank), root=root)


def test_an_unknown_way_to_treat_objects(group):
    with pytest.raises(ss.InvalidArgumentError, match="'keep' or 'pickle'"):
        ss.synchronize(group, [], objects="drop")


def test_in_a_part_of_the_group(group):
    half = group.split(group.rank % 2, group.rank)
    got = ss.synchronize(half, filled(group.rank), root=half.size - 1)
    last = (group.size - 1 - group.rank % 2) // 2 * 2 + group.rank % 2
    assert_all(got, last + 1)
    half.close()


def test_a_generator_is_refused(group):
    with pytest.raises(ss.InvalidArgumentError, match="generator is not a tree of arrays"):
        ss.synchronize(group, (np.zeros(2) for _ in range(3)))
