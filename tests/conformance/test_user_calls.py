"""Texts of errors begin with what the user called, and speak of no step inside it."""

import re

import numpy as np
import pytest
import samestep as ss
from samestep import _core, arrays
from samestep.trees import fusion

pytestmark = pytest.mark.ranks(2, 3)

TREE = {"w": np.ones(3), "b": 2.0}
CALLS = {
    "synchronize(root=0, objects='keep')": lambda g, **how: ss.synchronize(g, dict(TREE), **how),
    "synchronize(root=1, objects='pickle')": lambda g, **how: ss.synchronize(
        g, ["a"], root=1, objects="pickle", **how
    ),
    "allreduce_gradients(op=AVG)": lambda g, **how: ss.allreduce_gradients(g, dict(TREE), **how),
    "allreduce_tree(op=MAX)": lambda g, **how: ss.allreduce_tree(g, dict(TREE), "max", **how),
    "println": lambda g, **how: ss.println(g, "line", **how),
    "bcast_object(root=1)": lambda g, **how: g.bcast_object("x", root=1, **how),
    "allgather_object": lambda g, **how: g.allgather_object("x", **how),
    "gather_object(root=0)": lambda g, **how: g.gather_object("x", **how),
    "scatter_object(root=0)": lambda g, **how: g.scatter_object(["x"] * g.size, **how),
    "scatter(root=0)": lambda g, **how: g.scatter(np.ones(g.size), **how),
    "scatterv(root=0)": lambda g, **how: g.scatterv(np.ones(g.size), [1] * g.size, **how),
    "allgatherv of float64[2]": lambda g, **how: g.allgatherv(np.ones(2), **how),
    "gatherv of float64[2]": lambda g, **how: g.gatherv(np.ones(2), **how),
    "alltoallv of float64[2]": lambda g, **how: g.alltoallv(np.ones(2), [2] + [0] * (g.size - 1), **how),
    "split(color=1, key=0)": lambda g, **how: g.split(1, **how),
    "allreduce of float64[2] with op max": lambda g, **how: g.allreduce(np.ones(2), "max", **how),
}
INSIDE = re.compile(r"uint(8|64)|int64\[|group creation|split \d color")


def text_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("called", CALLS)
def test_ranks_that_call_something_else(group, called):
    call = (lambda: CALLS[called](group)) if group.rank == 0 else group.barrier
    text = text_of(ss.MismatchError, call)
    others = "rank 1" if group.size == 2 else "ranks 1, 2"
    assert f"rank 0: {called}; {others}: barrier" in text
    assert not INSIDE.search(text), text
    assert group.allreduce(1) == group.size


@pytest.mark.parametrize("called", CALLS)
def test_a_rank_that_does_not_come(group, called):
    part = group._split(0, 0, group.timeout, "part")
    if part.rank == 0:
        text = text_of(ss.TimeoutError, lambda: CALLS[called](part, timeout=0.05))
        assert re.match(
            rf"rank 0[^:]*: {re.escape(called)}[^:]* \(operation \d+ of group 'part'\) has waited", text
        ), text
        assert not INSIDE.search(text), text
    group.barrier()


def test_the_leaves_of_a_message_are_named(group):
    part = group._split(0, 0, group.timeout, "part")
    if part.rank == 0:  # as where the trees have been compared, and the others leave then
        leaves = [np.ones(3), np.ones(4)]
        reduce = lambda: fusion.allreduce_leaves(  # noqa: E731
            part,
            leaves,
            [arrays.info(x) for x in leaves],
            ss.SUM.value,
            1.0,
            names=["w", "b"],
            left=fusion.timer(0.2),
        )
        with _core.UserCall("allreduce_gradients(op=SUM)"):
            text = text_of(ss.TimeoutError, reduce)
        assert "allreduce_gradients(op=SUM), leaves 'w' to 'b' (operation " in text
    group.barrier()


def test_one_verb_with_two_roots(group):
    text = text_of(ss.MismatchError, lambda: group.bcast_object("x", root=int(group.rank == 0)))
    assert text.startswith("bcast_object (operation ")
    assert "rank 0: bcast_object(root=1); " in text


def test_where_all_call_the_same_its_step_tells_the_ranks_apart(group):
    with _core.UserCall("evaluate(step=3)"):
        text = text_of(ss.MismatchError, group.barrier if group.rank else lambda: group.allgather_object(1))
    assert "rank 0: evaluate(step=3), in it allgather of int64[]; " in text
    assert group.allreduce(1) == group.size


class WithoutShape:
    def __init__(self):
        self.__cuda_array_interface__ = {"version": 3}


FOREIGN = [WithoutShape(), np.array([None] * 6), np.ones(6, ">f4")]
GIVEN_FOREIGN = {
    "allreduce": lambda g, x: g.allreduce(x),
    "allreduce, again": lambda g, x: g.iallreduce(x),
    "reduce": lambda g, x: g.reduce(x, root=g.rank),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x),
    "bcast": lambda g, x: g.bcast(x, root=g.rank),
    "bcast, again": lambda g, x: g.bcast(x, root=(g.rank + 1) % g.size),
    "gather": lambda g, x: g.gather(x, root=g.rank),
    "gather, again": lambda g, x: g.gather(x, root=(g.rank + 1) % g.size),
    "scatter": lambda g, x: g.scatter(x),
    "scatterv": lambda g, x: g.scatterv(x, [6] + [0] * (g.size - 1)),
    "allgather": lambda g, x: g.allgather(x),
    "allgatherv": lambda g, x: g.allgatherv(x),
    "gatherv": lambda g, x: g.gatherv(x),
    "alltoall": lambda g, x: g.alltoall(x),
    "alltoallv": lambda g, x: g.alltoallv(x, [6] + [0] * (g.size - 1)),
    "send": lambda g, x: g.send(x, 0),
    "recv": lambda g, x: g.recv(x, 0),
    "sendrecv": lambda g, x: g.sendrecv(x, 0, np.ones(6), 0),
    "sendrecv, again": lambda g, x: g.sendrecv(np.ones(6), 0, x, 0),
}


@pytest.mark.parametrize("verb", GIVEN_FOREIGN)
def test_an_array_that_cannot_be_sent_is_refused_in_the_name_of_the_verb(group, verb):
    for x in FOREIGN:
        text = text_of(ss.InvalidArgumentError, lambda x=x: GIVEN_FOREIGN[verb](group, x))
        assert text.startswith(f"{verb.split(',')[0]}: "), text
        assert text.count(f"{verb.split(',')[0]}: ") == 1, text
    group.barrier()


@pytest.mark.parametrize("op", ["averge", np.ones(2)])
def test_what_is_no_operator_is_refused_in_the_name_of_the_call(group, op):
    x = np.ones(group.size)
    for called, call in {
        "allreduce": lambda: group.allreduce(x, op),
        "reduce": lambda: group.reduce(x, op),
        "reduce_scatter": lambda: group.reduce_scatter(x, op),
        "allreduce_gradients": lambda: ss.allreduce_gradients(group, {"x": x}, op),
        "allreduce_tree": lambda: ss.allreduce_tree(group, {"x": x}, op),
    }.items():
        assert text_of(ss.InvalidArgumentError, call).startswith(f"{called}: op ")


def test_a_leaf_that_cannot_be_sent_is_refused_in_the_name_of_the_call(group):
    tree = {"w": WithoutShape()}
    for called, call in {
        "synchronize(root=0, objects='keep')": lambda: ss.synchronize(group, tree),
        "allreduce_gradients(op=AVG)": lambda: ss.allreduce_gradients(group, tree),
        "allreduce_tree(op=MAX)": lambda: ss.allreduce_tree(group, tree, "max"),
        "same()": lambda: group.same(tree),
    }.items():
        assert text_of(ss.InvalidArgumentError, call).startswith(
            f"{called} in group {group.name}: leaf ['w']"
        )
    group.barrier()


def test_an_operator_that_does_not_fit(group):
    z = np.ones(2) + 0j
    assert text_of(ss.InvalidArgumentError, lambda: group.allreduce(z, "max")).startswith("allreduce: op max")
    text = text_of(ss.InvalidArgumentError, lambda: ss.allreduce_gradients(group, {"z": z}, "max"))
    assert text.startswith("allreduce_gradients(op=MAX): op max")
