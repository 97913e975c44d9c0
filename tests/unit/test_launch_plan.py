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
    got = plan.environment(place, master_addr="a", master_port=1234, secret="s", inherited={})
    assert got == {
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1234",
        "WORLD_SIZE": "3",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "SAMESTEP_SECRET": "s",
    }


def test_under_torchrun_ranks_have_a_store_of_their_own():
    place = plan.places(["a"])[0]
    where = {"master_addr": "a", "master_port": 1, "secret": "s"}
    variable = "TORCHELASTIC_USE_AGENT_STORE"
    assert plan.environment(place, **where, inherited={variable: "True"})[variable] == "False"


def test_what_other_hosts_need():
    env = {"PATH": "p", "HOME": "h", "NCCL_DEBUG": "INFO", "OMP_X": "1", "SAMESTEP_TIMEOUT": "5", "LANG": "C"}
    assert set(plan.for_other_hosts(env)) == {"PATH", "NCCL_DEBUG", "OMP_X", "SAMESTEP_TIMEOUT"}
