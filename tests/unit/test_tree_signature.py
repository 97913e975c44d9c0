"""What a leaf is called when ranks compare, and which leaves are one."""

import re

import numpy as np
import pytest
import samestep as ss
from samestep.trees.signature import NUMBER, OBJECT, Description, check_same, describe_leaves


def look(*leaves):
    return describe_leaves([f"[{i}]" for i in range(len(leaves))], leaves, "synchronize")


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (np.zeros((2, 3), "f4"), "float32 (2, 3)"),
        (np.zeros(()), "float64 ()"),
        (np.zeros(0, "?"), "bool (0,)"),
        (1, NUMBER),
        (1j, NUMBER),
        (True, NUMBER),
        (np.float32(1), NUMBER),
        (np.bool_(True), NUMBER),
        (None, "None"),
        ("text", OBJECT),
        (b"bytes", OBJECT),
        (np.str_("text"), OBJECT),
        (np.array(["text"]), OBJECT),
        (np.array([None]), OBJECT),
        (len, OBJECT),
        (object(), OBJECT),
    ],
)
def test_what_leaves_are(leaf, what):
    assert look(leaf).kinds == [what]
    assert (look(leaf).infos[0] is None) == (what in (NUMBER, OBJECT, "None"))


def test_an_array_that_cannot_be_sent_is_named():
    table = look(1, np.zeros(3, "longdouble"))
    assert table.kinds == [NUMBER, OBJECT]
    assert list(table.problems) == [1]
    assert re.search("(float128|longdouble).* cannot be sent", table.problems[1])


def test_one_array_twice():
    array = np.zeros(3)
    assert look(array, np.zeros(3), array).aliases == [0, 1, 0]


def test_views_of_the_same_elements():
    array = np.zeros((2, 3))
    assert look(array[:], array, array[:1], array.T, array[::1], array.view("i8")).aliases == [
        0,
        0,
        2,
        3,
        0,
        5,
    ]


def test_memory_that_numpy_does_not_own():
    memory = bytearray(24)
    views = [np.frombuffer(memory), np.frombuffer(memory), np.frombuffer(memory, offset=8)]
    assert look(*views).aliases == [0, 0, 2]


def test_empty_arrays_numbers_and_texts_are_never_shared():
    array = np.zeros(4)
    assert look(array[:0], array[:0], 1, 1, "a", "a", None, None).aliases == list(range(8))


def describe(act="act", names=("a", "b"), kinds=("x", "y"), aliases=(0, 1)):
    return Description(act, list(names), list(kinds), list(aliases))


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (describe(act="other"), "act on ranks 0, 1 and other on rank 2; all ranks must make the same call"),
        (describe(kinds=("x", "z")), "act in group g: leaf b is y on ranks 0, 1 and z on rank 2"),
        (describe(names="a", kinds="x", aliases=[0]), "leaf b is y on ranks 0, 1 and missing on rank 2"),
        (describe(names="ac"), "leaf b is y on ranks 0, 1 and missing on rank 2"),
        (describe(aliases=(0, 0)), "leaf b is y on ranks 0, 1 and the array a again on rank 2"),
        (describe(names="ba", kinds="yx"), "the leaves are ordered a, b on ranks 0, 1 and b, a on rank 2"),
    ],
)
def test_the_first_difference_is_named(others, text):
    with pytest.raises(ss.MismatchError) as caught:
        check_same("g", [describe(), describe(), others])
    assert text in str(caught.value)


def test_none_may_stand_for_zeros():
    everyone = [describe(), describe(kinds=("None", "y"))]
    check_same("g", everyone, absent_is_fine=True)
    with pytest.raises(ss.MismatchError, match="leaf a is x on rank 0 and None on rank 1"):
        check_same("g", everyone)


def test_the_same_is_no_difference():
    check_same("g", [describe()] * 3)
