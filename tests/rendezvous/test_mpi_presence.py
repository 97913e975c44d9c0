"""What MPI does not tell at the start: which ranks have not come, and whether the other hosts answer."""

import logging
import socket

import pytest
from samestep.errors import TimeoutError
from samestep.world import mpi_world

ENDPOINT = mpi_world._Endpoint("10.0.0.7", 41021, 41022)


class Attempts:
    """Stands in for `socket.create_connection`: fails at each port in turn as listed, then connects."""

    def __init__(self, listening=(), reserved=()):
        self.errors = {ENDPOINT.port: list(listening), ENDPOINT.reserved: list(reserved)}

    def __call__(self, endpoint, timeout):
        address, port = endpoint
        assert address == ENDPOINT.address
        if self.errors[port]:
            raise self.errors[port].pop(0)
        return socket.socket()


@pytest.mark.parametrize(
    ("listening", "reserved", "reaches"),
    [
        ([], [ConnectionRefusedError()], True),
        (
            [OSError("timed out"), OSError(113, "No route to host")],
            [OSError(), ConnectionRefusedError()],
            True,
        ),
        ([], [], True),  # somebody else listens there: the host answers
        ([ConnectionRefusedError(), OSError("this is not asked for")], [], False),
        ([OSError("timed out")] * 1_000_000, [ConnectionRefusedError()], True),  # its queue is full
        ([], [OSError("timed out")] * 1_000_000, False),
    ],
)
def test_whether_a_rank_can_be_asked(monkeypatch, listening, reserved, reaches):
    monkeypatch.setattr(mpi_world, "_REACH_S", 0.05)
    monkeypatch.setattr(mpi_world, "_PAUSE_S", 0.0)
    attempts = Attempts(listening, reserved)
    monkeypatch.setattr(socket, "create_connection", attempts)
    assert mpi_world._reaches(ENDPOINT) is reaches


@pytest.mark.parametrize(("endpoint", "at"), [(ENDPOINT, " at 10.0.0.7:41021"), (None, "")])
def test_who_reaches_nobody_says_so(caplog, endpoint, at):
    with caplog.at_level(logging.WARNING, logger="samestep"):
        mpi_world._tell_unreached(0, 1, ["a/1", "b/2"], endpoint)
    expected = f"rank 0 cannot reach rank 1 (b){at} over TCP: ranks that die are found at the deadline"
    assert [record.message for record in caplog.records] == [expected]


class Names:
    """Stands in for mpi4py.MPI, with a launcher that keeps names, or does not."""

    THREAD_MULTIPLE = 3

    class Exception(Exception):
        pass

    def __init__(self, names, level=3):
        self.names = names
        self.level = level

    def Query_thread(self):
        return self.level

    def Publish_name(self, name, _):
        if self.names is None:
            raise self.Exception
        self.names.add(name)

    def Lookup_name(self, name):
        if name not in self.names:
            raise self.Exception
        return "here"


def missing(mpi, come=(), rank=0):
    call = mpi_world.PresenceRecord(mpi, rank=rank, size=4)
    if mpi.names is not None:
        mpi.names.update(call._name(other) for other in come)
    with call:
        return call.missing()


def test_ranks_that_have_not_written_their_names_are_missing():
    assert missing(Names(set()), come=[2]) == [1, 3]
    assert missing(Names(set()), come=[0, 2, 3], rank=1) == []
    assert missing(Names(set()), come=[]) == [1, 2, 3]


def test_where_nobody_keeps_names_nothing_is_known():
    assert missing(Names(None)) == []
    assert missing(Names(set(), level=1), come=[2]) == []


@pytest.mark.parametrize("absent", [[], [1, 2]])
def test_who_has_not_come_is_named_in_the_error(monkeypatch, absent):
    class Loaded:
        library = None

        def presence_record(self):
            call = mpi_world.PresenceRecord(None, rank=0, size=3)
            call._missing = absent
            return call

    def late(*_):
        raise TimeoutError("not all came")

    monkeypatch.setattr(mpi_world._core, "open_mpi_world", late)
    with pytest.raises(TimeoutError) as caught:
        mpi_world.open_world(Loaded(), oversubscribed=False, timeout=1)
    assert str(caught.value) == ("not all came: ranks 1-2 did not" if absent else "not all came")
