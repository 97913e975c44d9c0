"""A tree that is flattened and rebuilt is the same tree, whatever it is made of."""

import collections
import copy
import dataclasses
import functools
import pickle
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep import trees
from samestep.trees.reducible import why_refused


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: object
    label: str = "x"
    doubled: object = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Open:
    weight: object


@dataclasses.dataclass(slots=True)
class Slotted:
    a: object
    b: object


class TaggedList(list):
    tag = "none"


keys = st.one_of(st.integers(-20, 20), st.text(max_size=3), st.tuples(st.integers(0, 3)))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3))
tree_strategy = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=4).map(collections.OrderedDict),
        st.lists(children, max_size=3).map(lambda v: collections.deque(v, maxlen=7)),
        st.tuples(children, children).map(lambda p: Pair(*p)),
        st.tuples(children, children).map(lambda p: Slotted(*p)),
        children.map(Frozen),
    ),
    max_leaves=20,
)


def types_of(tree):
    """The containers of a tree, leaf values left out."""
    if dataclasses.is_dataclass(tree):
        return type(tree), [types_of(getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    if isinstance(tree, dict):
        return type(tree), [(key, types_of(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple, collections.deque)):
        return type(tree), [types_of(value) for value in tree]
    return "leaf"


@given(tree_strategy)
def test_rebuilding_from_the_same_leaves_gives_an_equal_tree(tree):
    flat = trees.flatten(tree)
    again = flat.rebuild(flat.leaves)
    assert again == tree
    assert types_of(again) == types_of(tree)
    assert len(flat.names) == len(flat.leaves) == len(set(flat.names))


@given(tree_strategy)
def test_the_original_is_left_as_it_was(tree):
    before = copy.deepcopy(tree)
    flat = trees.flatten(tree)
    flat.rebuild([f"new {i}" for i in range(len(flat.leaves))])
    assert tree == before


@given(tree_strategy)
def test_new_leaves_land_where_the_names_say(tree):
    flat = trees.flatten(tree)
    new = trees.flatten(flat.rebuild(range(len(flat.leaves))))
    assert new.names == flat.names
    assert new.leaves == list(range(len(flat.leaves)))


@given(st.dictionaries(keys, leaves, min_size=1), st.randoms())
def test_the_order_of_insertion_into_a_dict_does_not_matter(mapping, random):
    items = list(mapping.items())
    random.shuffle(items)
    assert trees.flatten(dict(items)).names == trees.flatten(mapping).names


@given(tree_strategy)
def test_names_written_behind_the_tree_lead_to_the_leaf(tree):
    for name, leaf in zip(*trees.flatten(tree)[:2], strict=True):
        found = eval("tree" + name, {"tree": tree})
        assert found is leaf or found == leaf


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (3.0, [""]),
        (None, [""]),
        ({}, []),
        ([], []),
        ({"b": 1, "a": {"c": 2}}, ["['a']['c']", "['b']"]),
        (collections.OrderedDict(b=1, a=2), ["['b']", "['a']"]),
        ({1: "i", "1": "s"}, ["[1]", "['1']"]),
        (Pair(1, [2, (3,)]), [".left", ".right[0]", ".right[1][0]"]),
        (Frozen(1), [".weight", ".label", ".doubled"]),
    ],
)
def test_names(tree, names):
    assert trees.flatten(tree).names == names


def test_none_is_a_leaf():
    assert trees.flatten([None, 1]).leaves == [None, 1]


def test_a_default_dict_keeps_its_factory_and_a_list_its_attributes():
    mapping = collections.defaultdict(list, a=1)
    assert trees.flatten(mapping).rebuild([2])["missing"] == []
    tagged = TaggedList([1])
    tagged.tag = "kept"
    assert trees.flatten(tagged).rebuild([2]).tag == "kept"


class AttributeDict(dict):
    """Its entries are its attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Kept(collections.UserDict):
    """Has its entries a second time, as attributes."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


@pytest.mark.parametrize("kind", [AttributeDict, Kept])
def test_attributes_that_are_entries_become_the_new_entries(kind):
    built = trees.flatten(kind(w=np.ones(2), loss=0.5, none=None)).rebuild([3, 4, 5])
    assert type(built) is kind
    assert (built["loss"], built["none"], built["w"]) == (3, 4, 5) == (built.loss, built.none, built.w)


class AliasedDict(dict):
    """An attribute keeps the value with which it was made."""

    def __init__(self, entries):
        super().__init__(entries)
        self.first = None


class NamedWithAttributes(Pair):
    pass


class SlottedDict(dict):
    __slots__ = ("extra",)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (AliasedDict({"w": 1}), "first"),
        (TaggedList([1]), "tag"),
        (type("Deque", (collections.deque,), {})([1]), "a"),
        (type("User", (collections.UserDict,), {})(w=1), "a"),
        (type("Users", (collections.UserList,), {})([1]), "a"),
        (type("Tuple", (tuple,), {})([1]), "a"),
        (NamedWithAttributes(1, 2), "a"),
        (SlottedDict(w=1), "extra"),
    ],
)
@pytest.mark.parametrize("hidden", [np.ones(2), [np.ones(2)], {"deep": (np.ones(2),)}, object()])
def test_a_container_with_arrays_in_its_attributes_is_a_leaf(given, name, hidden):
    setattr(given, name, hidden)
    [leaf] = trees.flatten(given).leaves
    assert leaf is given
    assert "arrays in other attributes" in why_refused(given)
    setattr(given, name, {"version": [1, None, "x"]})
    assert len(trees.flatten(given).leaves) == len(given)


def test_attributes_of_a_record_that_hold_arrays_are_fields():
    record = Open(np.ones(1))
    record.version = 3
    assert trees.flatten(record).names == [".weight"]
    record.later = [np.zeros(2)]
    flat = trees.flatten(record)
    assert flat.names == [".weight", ".later[0]"]
    built = flat.rebuild([1, 2])
    assert (built.weight, built.later, built.version) == (1, [2], 3)
    assert record.later[0].shape == (2,)


def test_a_layer_that_is_called_like_a_function_is_no_function():
    def layer(x):
        return x

    assert why_refused(layer) is None
    layer.weight = np.ones(2)
    assert "no arrays can be seen" in why_refused(layer)
    assert "no arrays can be seen" in why_refused(functools.partial(layer, 1))
    assert why_refused(dict.get) is None


def test_strings_bytes_arrays_and_classes_are_leaves():
    tree = ["text", b"bytes", np.ones(2), np.float32(1), Frozen, len]
    assert all(a is b for a, b in zip(trees.flatten(tree).leaves, tree, strict=True))


def test_a_rebuilt_tree_can_be_pickled():
    flat = trees.flatten({"pair": Pair(1, 2)})
    assert pickle.loads(pickle.dumps(flat.rebuild([3, 4]))) == {"pair": Pair(3, 4)}


class Shared(collections.abc.MutableMapping):
    """Two views of one dict, as `copy.copy` makes them."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        return self.entries[key]

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class Broken(Shared):
    def __getitem__(self, key):
        raise OSError("a file that is gone")


def test_a_mapping_that_shares_its_entries_is_left_as_it_was():
    given = Shared({"b": 1, "a": 2})
    flat = trees.flatten(given)
    assert flat.names == ["['a']", "['b']"]
    assert dict(flat.rebuild([3, 4])) == {"a": 3, "b": 4}
    assert dict(given) == {"b": 1, "a": 2}


def test_a_mapping_that_cannot_be_read_is_a_leaf():
    given = Broken({"a": 1})
    assert trees.flatten([given]).leaves == [given]


def test_two_keys_of_one_name_are_no_names():
    one, other = type("Key", (), {"__repr__": lambda _: "k"}), type("Key", (), {"__repr__": lambda _: "k"})
    given = {one(): 1, other(): 2}
    assert trees.flatten(given).leaves == [given]


def test_a_container_in_itself_ends():
    given = []
    given.append(given)
    [leaf] = trees.flatten(given).leaves
    assert leaf is given
