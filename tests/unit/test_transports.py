"""Which transport is selected for a world."""

import pytest
import samestep as ss
from samestep.world import transports

ONE, TWO, ALONE = ["a"] * 4, ["a", "a", "b", "b"], ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("backend", "asked", "hosts", "transport"),
    [
        ("native", "auto", ONE, "shm"),
        ("native", "auto", TWO, "hierarchical"),
        ("native", "auto", ALONE, "flat"),
        ("native", "tcp", ONE, "flat"),
        ("native", "tcp", TWO, "flat"),
        ("native", "shm", ONE, "shm"),
        ("native", "hierarchical", ONE, "shm"),
        ("native", "hierarchical", ALONE, "hierarchical"),
        ("mpi", "auto", ["a", "b", "b"], "hierarchical"),
        ("mpi", "mpi", TWO, "flat"),
        ("mpi", "mpi", ONE, "flat"),
    ],
)
def test_the_engine_follows_the_hosts_and_the_variable(backend, asked, hosts, transport):
    assert transports.choose(backend, asked, hosts) == transport


def test_shared_memory_is_for_one_host():
    with pytest.raises(ss.UnavailableError, match="there are 2; leave it out, or set it to tcp"):
        transports.choose("native", "shm", ["a", "b"])
