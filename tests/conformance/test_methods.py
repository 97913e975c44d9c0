"""A verb of a group is an ordinary method: overridden, documented, replaced, and bound to nothing but its object."""

import gc
import inspect
import pydoc
import weakref
from unittest import mock

import numpy as np
import pytest
import samestep as ss
from samestep import _core
from samestep.group.group import Group

FAST = [
    "allreduce",
    "reduce",
    "reduce_scatter",
    "bcast",
    "allgather",
    "alltoall",
    "barrier",
    "send",
    "recv",
    "sendrecv",
]


@pytest.mark.ranks(1, 2)
def test_an_override_is_called_for_every_kind_of_array(group):
    calls = []

    class Counting(type(group)):
        def allreduce(self, x, op="sum", **how):
            calls.append(op)
            return super().allreduce(x, op, **how)

    made = Counting(group._comm, timeout=60.0, world_hosts=["here"] * group.size)
    contiguous, strided = np.ones(3), np.ones(6)[::2]
    assert made.allreduce(contiguous) is contiguous
    assert made.allreduce(strided, "max").tolist() == [1.0] * 3
    assert ss.allreduce(made, contiguous, timeout=30.0).tolist() == [float(group.size**2)] * 3
    assert calls == ["sum", "max", "sum"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", FAST)
def test_help_shows_the_docstring_and_the_signature(group, name):
    text = pydoc.render_doc(getattr(group, name), renderer=pydoc.plaintext)
    method = getattr(Group, name)
    assert inspect.getdoc(method).splitlines()[0] in text
    assert "timeout: float | None = None" in str(inspect.signature(method)).replace("'", "")
    assert (
        list(inspect.signature(getattr(group, name)).parameters)
        == list(inspect.signature(method).parameters)[1:]
    )
    assert (method.__name__, method.__qualname__) == (name, f"Backend.{name}")


@pytest.mark.ranks(1)
@pytest.mark.parametrize("on", ["object", "class"])
def test_a_mock_replaces_a_verb_and_goes_away(group, on):
    x = np.ones(2)
    with mock.patch.object(group if on == "object" else type(group), "allreduce", autospec=True) as replaced:
        replaced.return_value = "mocked"
        assert group.allreduce(x) == "mocked"
        assert ss.allreduce(group, x) == "mocked"
        assert replaced.call_count == 2
    assert group.allreduce(x) is x


@pytest.mark.ranks(1)
def test_nothing_is_set_on_instances_but_data(group):
    assert not [name for name, value in vars(group).items() if callable(value) and name != "_at_end"]


@pytest.mark.ranks(1)
def test_a_timeout_changes_no_group_and_makes_none(group):
    changed = []

    class Watched(type(group)):
        def __setattr__(self, name, value):  # a copy would be given its timeout
            changed.append(name)
            super().__setattr__(name, value)

    made = Watched(group._comm, timeout=60.0, world_hosts=["here"])
    del changed[:]
    made.allreduce(np.ones(6)[::2], timeout=30.0)
    made.bcast_object("x", timeout=30.0)
    assert changed == []
    assert type(made.timeout) is float


@pytest.mark.ranks(1)
def test_a_group_goes_away_with_its_last_name(group):
    child = group.split(0)
    child.barrier()
    child.close()
    seen = weakref.ref(child)
    del child
    gc.collect()
    assert seen() is None


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", FAST)
def test_arguments_that_do_not_fit_are_refused_in_the_words_of_the_method(group, name):
    with pytest.raises(TypeError, match=rf"Backend\.{name}\(\) got an unexpected keyword argument 'wrong'"):
        getattr(group, name)(*[np.ones(1)] * (name != "barrier"), wrong=1)
    with pytest.raises(TypeError):
        getattr(Group, name)()


@pytest.mark.ranks(1)
def test_without_a_communicator_the_general_path_is_taken(group):
    verb = _core.fast_method(lambda_named("allreduce", lambda self, x: ("general", x)))
    assert verb(object(), 1) == ("general", 1)
    assert verb(group, 1) == ("general", 1)  # no array
    with pytest.raises(ValueError, match="no fast path for a method named other"):
        _core.fast_method(lambda_named("other", lambda self: None))


def lambda_named(name, function):
    function.__name__ = name
    return function
