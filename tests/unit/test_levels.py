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
    assert levels.choose(backend, [asked] * len(hosts), hosts) == engine


@pytest.mark.parametrize(
    ("backend", "asked", "hosts", "error", "told"),
    [
        (
            "native",
            ["node", "node"],
            ["a", "b"],
            ss.UnavailableError,
            "there are 2; leave it out, or set it to tcp",
        ),
        (
            "native",
            ["fast", "fast"],
            ["a", "a"],
            ss.InvalidArgumentError,
            "SAMESTEP_NATIVE_ENGINE must be auto, node, hier or tcp, got 'fast' on rank 0",
        ),
        ("mpi", ["auto", "tcp"], ["a", "a"], ss.InvalidArgumentError, "or direct, got 'tcp' on rank 1"),
        ("mpi", ["auto", "hier"], ["a", "b"], ss.MismatchError, "auto on rank 0 but hier on rank 1"),
    ],
)
def test_a_wrong_engine_is_told(backend, asked, hosts, error, told):
    with pytest.raises(error, match=told):
        levels.choose(backend, asked, hosts)
