"""Nothing passes through an operation on a tree unseen: it is opened, or reduced, or refused by name on all ranks."""

import collections
import copy
import datetime
import decimal
import enum
import fractions
import types
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.fixture(autouse=True)
def usable_after(group):
    yield
    assert group.allreduce(1, timeout=10) == group.size


# ---- containers


class Fixed(collections.abc.Mapping):
    """A mapping that never changes."""

    def __init__(self, entries):
        self._entries = dict(entries)

    def __getitem__(self, key):
        return self._entries[key]

    def __iter__(self):
        return iter(self._entries)

    def __len__(self):
        return len(self._entries)


class Named(Fixed):
    """Cannot be built from its entries alone."""

    def __init__(self, name, entries):
        super().__init__(entries)
        self.name = name


class Tagged(Fixed):
    """Would lose its tag."""

    tag = None

    def with_tag(self, tag):
        self.tag = tag
        return self


class Row(collections.abc.Sequence):
    def __init__(self, items):
        self._items = tuple(items)

    def __getitem__(self, i):
        return self._items[i]

    def __len__(self):
        return len(self._items)


class ReadOnly(dict):
    def __setitem__(self, key, value):
        raise TypeError("read-only")


class Couple(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class Point(NamedTuple):
    w: object


class PointWithNote(Point):
    pass


class Attrs:
    """What attrs makes of a frozen class, as far as others may know."""

    __attrs_attrs__ = (types.SimpleNamespace(name="w"),)

    def __init__(self, w):
        object.__setattr__(self, "w", w)

    def __setattr__(self, name, value):
        raise AttributeError(name)


class Plain:
    def __init__(self, w):
        self.w = w


def with_note(w):
    made = PointWithNote(w)
    made.note = "kept"
    return made


OPENED = {
    "a namespace": (lambda w: types.SimpleNamespace(w=w), lambda t: t.w),
    "a mapping proxy": (lambda w: types.MappingProxyType({"w": w}), lambda t: t["w"]),
    "a user dict": (lambda w: collections.UserDict(w=w), lambda t: t["w"]),
    "a user list": (lambda w: collections.UserList([w]), lambda t: t[0]),
    "a chain of maps": (lambda w: collections.ChainMap({"w": w}), lambda t: t["w"]),
    "a mapping": (lambda w: Fixed({"w": w}), lambda t: t["w"]),
    "a sequence": (lambda w: Row([w]), lambda t: t[0]),
    "a read-only dict": (lambda w: ReadOnly(w=w), lambda t: t["w"]),
    "a tuple with arguments": (lambda w: Couple(w, None), lambda t: t[0]),
    "a named tuple with attributes": (with_note, lambda t: t.w),
    "attrs": (Attrs, lambda t: t.w),
}


class SGD:
    def init(self, params):
        return ()

    def update(self, grads, state, params=None):
        return grads, state


def added(group, tree):
    total = ss.Accumulator(group)
    total.add(tree)
    return total.mean()


def sharded(group, tree):
    return ss.ShardedOptimizer(group, SGD(), elementwise=True).update(tree, (), None)[0]


MEANS = {
    "allreduce_tree": lambda group, tree: group.allreduce_tree(tree, "avg"),
    "allreduce_gradients": ss.allreduce_gradients,
    "weight": lambda group, tree: ss.allreduce_gradients(group, tree, weight=2.0),
    "DistributedOptimizer": lambda group, tree: ss.DistributedOptimizer(group, SGD()).update(tree, ())[0],
    "ShardedOptimizer": sharded,
    "Accumulator": added,
}


@pytest.mark.parametrize("kind", OPENED)
def test_containers_that_can_be_built_again_are_opened(group, kind):
    make, inner = OPENED[kind]
    for call in MEANS.values():
        given = make(np.full(3, group.rank + 1.0))
        got = call(group, {"k": given})["k"]
        assert type(got) is type(given)
        assert got is not given
        np.testing.assert_array_equal(inner(got), (group.size + 1) / 2)
        assert getattr(got, "note", None) == getattr(given, "note", None)


# ---- what is refused


class HoldsAnArray:
    """Passes on all attributes of the array that it holds, as wrappers with a unit do."""

    def __init__(self, w):
        self.w = w

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "__dict__")["w"], name)


class Loss(float):
    pass


def nested(w):
    for _ in range(900):
        w = [w]
    return w


def endless(w):
    made = [w]
    made.append(made)
    return made


def of_objects(w):
    made = np.empty(1, object)
    made[0] = w
    return made


REFUSED = {
    "a plain class": Plain,
    "a mapping with more than entries": lambda w: Named("n", {"w": w}),
    "a mapping that would lose an attribute": lambda w: Tagged({"w": w}).with_tag("t"),
    "keys without a name": lambda w: {Plain(0): w, Plain(1): w},
    "a wrapper of an array": HoldsAnArray,
    "an array of objects": of_objects,
    "an array of records": lambda _: np.ones(2, [("a", "i4"), ("b", "f8")]),
    "a record": lambda _: np.ones(2, [("a", "i4"), ("b", "f8")])[0],
    "long doubles": lambda w: w.astype(np.longdouble),
    "foreign byte order": lambda w: w.astype(">f4"),
    "dates in NumPy": lambda _: np.array(["2026-01-01"], "M8[D]"),
    "a date in NumPy": lambda _: np.datetime64("2026-01-01"),
    "a time": lambda _: datetime.datetime(2026, 1, 1),
    "an int of 71 bits": lambda _: 1 << 70,
    "a fraction": lambda _: fractions.Fraction(1, 3),
    "a decimal": lambda _: decimal.Decimal(1),
    "a float of its own class": lambda _: Loss(1.0),
    "a set": lambda _: {1.5},
    "an iterator": lambda w: iter([w]),
    "a deep list": nested,
    "a list in itself": endless,
}
if np.dtype(np.longdouble) == np.dtype("f8"):
    del REFUSED["long doubles"]


@pytest.mark.parametrize("who", ["all", "the last"])
@pytest.mark.parametrize("kind", REFUSED)
def test_all_else_is_refused_by_name_on_all_ranks(group, kind, who):
    w = np.full(3, group.rank + 1.0)
    leaf = REFUSED[kind](w) if who == "all" or group.rank == group.size - 1 else w
    tree = {"k": leaf, "x": np.full(2, group.rank + 1.0)}
    for name, call in MEANS.items():
        if name != "Accumulator":
            with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['k'\]") as caught:
                call(group, tree)
            assert len(set(group.allgather_object(str(caught.value)))) == 1
            np.testing.assert_array_equal(tree["x"], group.rank + 1)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_accumulator_refuses_it_where_it_is_added(group, kind):
    with pytest.raises(ss.InvalidArgumentError, match=r"Accumulator.add: leaf \['k'\]"):
        added(group, {"k": REFUSED[kind](np.ones(3))})


# ---- what passes


class Color(enum.Enum):
    RED = 1
    BLUE = 2


PASSED = {
    "texts": ("relu", "tanh"),
    "bytes": (b"a", b"b"),
    "texts of NumPy": (np.str_("a"), np.str_("b")),
    "arrays of texts": (np.array(["a"]), np.array(["b"])),
    "members of enumerations": (Color.RED, Color.BLUE),
    "functions": (np.tanh, len),
    "classes": (Plain, Color),
    "modules": (np, types),
    "types of elements": (np.dtype("f4"), np.dtype("f8")),
    "paths": (PurePosixPath("/a"), PurePosixPath("/b")),
    "ranges": (range(2), range(3)),
    "slices": (slice(2), slice(3)),
}


@pytest.mark.parametrize("kind", PASSED)
def test_what_can_be_no_gradient_is_returned(group, kind):
    mine = PASSED[kind][group.rank % 2]
    for call in MEANS.values():
        got = call(group, {"k": mine, "x": np.full(3, group.rank + 1.0)})
        assert got["k"] is mine
        np.testing.assert_array_equal(got["x"], (group.size + 1) / 2)


@pytest.mark.parametrize("call", MEANS)
def test_a_flag_that_differs_is_no_constant(group, call):
    assert MEANS[call](group, {"k": True, "n": np.bool_(False)}) == {"k": True, "n": False}
    if group.size > 1:
        with pytest.raises(
            ss.MismatchError, match=r"leaf \['k'\] is the flag True on rank 0 and the flag False"
        ):
            MEANS[call](group, {"k": group.rank == 0, "x": np.ones(1)})


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max"])
@pytest.mark.parametrize("value", [3, -(1 << 20), 1 << 61, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1])
def test_python_ints_are_exact_or_refused(group, op, value):
    n = group.size
    exact = {"sum": n * value, "avg": value, "prod": value**n, "max": value}[op]
    try:
        got = group.allreduce_tree({"k": value}, op)["k"]
    except ss.InvalidArgumentError as error:
        assert "leaf ['k']" in str(error)
        assert n > 1
        assert abs(value) > 1 << 20
    else:
        assert got == exact


# ---- comparing


OTHERS = {
    **PASSED,
    "fractions": (fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    "decimals": (decimal.Decimal("0.1"), decimal.Decimal("0.10")),
    "ints": (1 << 70, (1 << 70) + 1),
    "numbers of several types": (np.float32(1), np.float64(1)),
    "long doubles": (
        np.full(2, 1, np.longdouble),
        np.full(2, 1 + np.finfo(np.longdouble).eps, np.longdouble),
    ),
    "foreign byte order": (np.ones(2, ">f4"), np.zeros(2, ">f4")),
    "records": (np.ones(2, [("a", "i4"), ("b", "f8")]), np.zeros(2, [("a", "i4"), ("b", "f8")])),
    "dates": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    "dates in NumPy": (np.array(["2026-01-01"], "M8[D]"), np.array(["2026-01-02"], "M8[D]")),
    "units of dates": (np.array([5], "m8[s]"), np.array([5], "m8[ms]")),
    "objects that are texts": (np.array(["a", None], object), np.array(["b", None], object)),
    "sets": ({"a", "b", "c"}, {"a", "b"}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_same_sees_every_difference(group, kind):
    one, other = OTHERS[kind]
    assert len({*group.allgather_object(group.same({"k": one}))}) == 1
    alone = group.group([group.rank])
    assert alone.same({"k": one}) != alone.same({"k": other})
    if group.size > 1:
        with pytest.raises(ss.MismatchError, match=r"leaf \['k'\]"):
            group.same({"k": one if group.rank else other})


SEEN_BY_SAME = (
    "objects",
    "long doubles",
    "foreign byte order",
    "record",
    "date",
    "time",
    "int",
    "fraction",
    "decimal",
    "set",
)


@pytest.mark.parametrize("who", ["all", "the last"])
@pytest.mark.parametrize("kind", [kind for kind in REFUSED if not any(word in kind for word in SEEN_BY_SAME)])
def test_same_refuses_what_it_cannot_compare(group, kind, who):
    leaf = REFUSED[kind](np.ones(3)) if who == "all" or group.rank == group.size - 1 else "text"
    with pytest.raises(ss.InvalidArgumentError, match=r"same\(\).*leaf \['k'\].* ranks cannot compare"):
        group.same({"k": leaf})


def test_verify_refuses_what_it_cannot_compare(group, monkeypatch):
    monkeypatch.setenv("SAMESTEP_VERIFY", "1")
    opt = ss.DistributedOptimizer(group, SGD())
    if group.size > 1:
        with pytest.raises(
            ss.InvalidArgumentError, match=r"leaf \['args'\]\[1\]: a Plain, which ranks cannot compare"
        ):
            opt.update([np.ones(1)], (), Plain(group.rank))
        with pytest.raises(ss.MismatchError, match=r"leaf \['args'\]\[1\]\['how'\]"):
            opt.update([np.ones(1)], (), {"how": str(group.rank)})


# ---- finite


@pytest.mark.parametrize(
    ("leaf", "is_finite"),
    [
        ("text", True),
        (np.array(["nan"]), True),
        (1 << 2000, True),
        (fractions.Fraction(1, 3), True),
        (decimal.Decimal("Infinity"), False),
        (np.longdouble("nan"), False),
        (np.array([1, np.inf], np.longdouble), False),
        (np.array([1, np.nan], ">f4"), False),
        (np.array(["2026-01-01"], "M8[D]"), True),
        (np.datetime64("NaT", "s"), False),
    ],
)
def test_all_finite_of_unusual_numbers(group, leaf, is_finite):
    mine = leaf if group.rank == group.size - 1 else 1.0
    assert group.all_finite({"k": mine}) is is_finite


@pytest.mark.parametrize(
    "kind", ["a plain class", "a wrapper of an array", "an array of objects", "an array of records"]
)
def test_all_finite_refuses_what_it_cannot_see(group, kind):
    leaf = REFUSED[kind](np.full(3, np.nan)) if group.rank == group.size - 1 else np.ones(3)
    with pytest.raises(
        ss.InvalidArgumentError, match=r"all_finite\(\).*leaf \['k'\].*: a .* no numbers can be seen"
    ):
        group.all_finite({"k": leaf})


# ---- the rest


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.astype(np.longdouble),
        lambda w: w.astype(">f4"),
        lambda w: np.full(2, w[0], [("a", "f8")]),
        Plain,
    ],
    ids=["long doubles", "foreign byte order", "records", "a plain class"],
)
def test_pickled_objects_may_be_anything(group, make):
    got = group.synchronize({"k": make(np.full(3, group.rank + 1.0))}, objects="pickle")["k"]
    got, want = (got.w, np.ones(3)) if isinstance(got, Plain) else (got, make(np.ones(3)))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


KEYS = {
    "sets": [frozenset("ab"), frozenset("c"), frozenset("d"), frozenset("abc")],
    "members of enumerations": [Color.BLUE, Color.RED],
    "classes": [int, float, Plain],
    "tuples": [("b", 1), ("a", 10), ("a", 2)],
    "keys of several types": [1, "1", None, (1, "a"), 2.5],
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_are_ordered_by_name(group, kind):
    numbered = [(key, 10.0 * i) for i, key in enumerate(KEYS[kind])]
    turn = group.rank % len(numbered)
    tree = {key: np.full(2, value + group.rank) for key, value in numbered[turn:] + numbered[:turn]}
    got = group.allreduce_tree(tree, "max")
    assert list(got) == list(tree)
    for key, value in numbered:
        np.testing.assert_array_equal(got[key], value + group.size - 1)


class Unit(np.ndarray):
    def __array_finalize__(self, other):
        self.unit = getattr(other, "unit", "m")


def in_unit(values, unit):
    made = values.view(Unit)
    made.unit = unit
    return made


@pytest.mark.parametrize("call", MEANS)
def test_units_of_arrays_must_agree(group, call):
    got = MEANS[call](group, {"k": in_unit(np.full(3, group.rank + 1.0), "km")})["k"]
    np.testing.assert_array_equal(got, (group.size + 1) / 2)
    if group.size > 1:
        with pytest.raises(
            ss.MismatchError, match=r"leaf \['k'\] is .* with unit 'm' on rank 0 and .*unit 'km'"
        ):
            MEANS[call](group, {"k": in_unit(np.ones(3), "km" if group.rank else "m")})
    with pytest.raises(ss.InvalidArgumentError, match="attribute 'unit' ranks cannot compare"):
        MEANS[call](group, {"k": in_unit(np.ones(3), Plain(1))})


def test_metrics_of_one_rank_that_are_no_numbers(group):
    mine = Plain(1) if group.rank == group.size - 1 else 1.0
    with pytest.raises(
        ss.InvalidArgumentError, match="'loss' must be a sum and a count, real numbers; got Plain"
    ):
        ss.metric_mean(group, {"loss": (mine, 1)})
    with pytest.raises(
        ss.InvalidArgumentError, match=r"leaf \['loss'\].*: a Plain, which is no array or number"
    ):
        ss.gather_metrics(group, {"loss": mine})


def test_copies_of_what_holds_a_group_use_the_same_group(group):
    assert copy.deepcopy({"b": group})["b"] is group
    opt = copy.deepcopy(ss.DistributedOptimizer(group, SGD()))
    total = copy.deepcopy(ss.Accumulator(group))
    for got in (opt.update([np.full(2, group.rank + 1.0)], ())[0], added_twice(total, group.rank + 1.0)):
        np.testing.assert_array_equal(got[0], (group.size + 1) / 2)
    total.add([np.ones(2)])
    with pytest.raises(ss.InvalidArgumentError, match="no copies in the middle of a step"):
        copy.copy(total)


def added_twice(total, value):
    total.add([np.full(2, value)])
    total.add([np.full(2, value)])
    return total.mean()


def test_a_sharded_optimizer_keeps_no_array_to_itself(group):
    tree = {"k": 1.0 + group.rank, "x": np.full(3, group.rank + 1.0), "mask": None}
    got = sharded(group, tree)
    assert got["k"] == (group.size + 1) / 2
    assert type(got["k"]) is float
    tree["mask"] = np.array([group.rank == 0])
    if group.size > 1:
        with pytest.raises(ss.InvalidArgumentError, match=r"leaf \['mask'\].*an array of bool \(1,\)"):
            sharded(group, tree)
