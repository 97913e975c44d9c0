"""What MPI does not tell at the start: whether the other hosts answer."""

import logging
import socket

import pytest
from samestep.world import mpi_liveness

ENDPOINT = mpi_liveness._Endpoint("10.0.0.7", 41021, 41022)


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
    monkeypatch.setattr(mpi_liveness, "_REACH_S", 0.05)
    monkeypatch.setattr(mpi_liveness, "_PAUSE_S", 0.0)
    attempts = Attempts(listening, reserved)
    monkeypatch.setattr(socket, "create_connection", attempts)
    assert mpi_liveness._reaches(ENDPOINT) is reaches


@pytest.mark.parametrize(("endpoint", "at"), [(ENDPOINT, " at 10.0.0.7:41021"), (None, "")])
def test_who_reaches_nobody_says_so(caplog, endpoint, at):
    with caplog.at_level(logging.WARNING, logger="samestep"):
        mpi_liveness._tell_unreached(0, 1, ["a/1", "b/2"], endpoint)
    expected = f"rank 0 cannot reach rank 1 (b){at} over TCP: ranks that die are found at the deadline"
    assert [record.message for record in caplog.records] == [expected]
