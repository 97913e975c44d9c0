"""Hosts -> ranks -> environment."""

import pytest
from samestep.launch import plan


@pytest.mark.parametrize(
    ("hosts", "rows"),  # (rank, local rank, ranks on the host, number of the host)
    [
        (["a"], [(0, 0, 1, 0)]),
        (["a", "a", "b"], [(0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 1, 1)]),
        (["b", "a", "b", "a"], [(0, 0, 2, 0), (1, 0, 2, 1), (2, 1, 2, 0), (3, 1, 2, 1)]),
        (["", "", "b"], [(0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 1, 1)]),
    ],
)
def test_places(hosts, rows):
    found = plan.places(hosts)
    assert [(p.rank, p.local_rank, p.local_size, p.node_rank) for p in found] == rows
    assert {p.n_ranks for p in found} == {len(hosts)}
    assert [p.host for p in found] == hosts


def test_environment_of_a_rank():
    place = plan.places(["a", "a", "b"])[1]
    got = plan.environment(place, launcher="samestep run", master_addr="a", master_port=1234, secret="s")
    assert got == {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1234",
        "WORLD_SIZE": "3",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "SAMESTEP_LAUNCHER": "samestep run",
        "SAMESTEP_SECRET": "s",
    }


def test_ranks_of_mpi_are_not_marked():
    """Their RANK is made of what MPI's launcher says, and both are of one job."""
    where = {"master_addr": "a", "master_port": 1, "secret": ""}
    assert "SAMESTEP_LAUNCHER" not in plan.environment(plan.places(["a"])[0], launcher="", **where)


def test_what_other_hosts_need():
    env = {"PATH": "p", "HOME": "h", "NCCL_DEBUG": "INFO", "OMP_X": "1", "SAMESTEP_TIMEOUT": "5", "LANG": "C"}
    assert set(plan.for_other_hosts(env)) == {"PATH", "NCCL_DEBUG", "OMP_X", "SAMESTEP_TIMEOUT"}
    chooses_code = {"OPENBLAS_CORETYPE": "Haswell"}  # without it the ranks there get other bits
    assert plan.for_other_hosts(chooses_code) == chooses_code
