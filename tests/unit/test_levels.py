"""Which engine carries a world."""

import pytest
import samestep as ss
from samestep import levels

ONE, TWO, ALONE = ["a"] * 4, ["a", "a", "b", "b"], ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("backend", "asked", "hosts", "engine"),
    [
        ("native", "auto", ONE, "node"),
        ("native", "auto", TWO, "hier"),
        ("native", "auto", ALONE, "flat"),
        ("native", "tcp", ONE, "flat"),
        ("native", "tcp", TWO, "flat"),
        ("native", "node", ONE, "node"),
        ("native", "hier", ONE, "node"),
        ("native", "hier", ALONE, "hier"),
        ("mpi", "auto", ["a", "b", "b"], "hier"),
        ("mpi", "direct", TWO, "flat"),
        ("mpi", "direct", ONE, "flat"),
    ],
)
def test_the_engine_follows_the_hosts_and_the_variable(backend, asked, hosts, engine):
    assert levels.choose(backend, asked, hosts) == engine


def test_shared_memory_is_for_one_host():
    with pytest.raises(ss.UnavailableError, match="there are 2; leave it out, or set it to tcp"):
        levels.choose("native", "node", ["a", "b"])
