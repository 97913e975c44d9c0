"""Where ranks meet and who they are, from URLs, arguments and variables."""

import pytest
import samestep as ss
from samestep.rendezvous.interfaces import check_names
from samestep.rendezvous.url import Method, parse, with_query

MASTER = {"MASTER_ADDR": "m", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": str(12001),
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "1",
    "SLURM_JOB_NODELIST": "n[1-9]",
    "SLURM_STEP_NODELIST": "n[7,8-9]-ib,m[1-2]",
}
TORCHRUN = {**MASTER, "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("url", "rank", "size", "env", "expected"),
    [
        ("env://", None, None, TORCHRUN, Method("m", 29500, "", 3, 4)),
        ("env://", 1, 2, TORCHRUN, Method("m", 29500, "", 1, 2)),
        ("env://?rank=0", None, None, TORCHRUN, Method("m", 29500, "", 0, 4)),
        ("env://", 0, 2, {"MASTER_PORT": "1"}, Method("", 1, "", 0, 2)),
        ("env://", None, None, SLURM, Method("n7-ib", 20010, "", 1, 8)),
        ("env://", None, None, SLURM | {"MASTER_ADDR": "m"}, Method("m", 20010, "", 1, 8)),
        ("env://", None, None, SLURM | MASTER, Method("m", 29500, "", 1, 8)),
        (
            "env://",
            None,
            None,
            {**MASTER, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            Method("m", 29500, "", 1, 2),
        ),
        (
            "env://",
            None,
            None,
            {**MASTER, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7"},
            Method("m", 29500, "", 7, 8),
        ),
        ("tcp://10.1.2.3:4567", 1, 2, {}, Method("10.1.2.3", 4567, "", 1, 2)),
        ("tcp://10.1.2.3:4567?rank=1&world_size=2", None, None, {}, Method("10.1.2.3", 4567, "", 1, 2)),
        ("tcp://[::1]:80?world_size=2", 0, None, {}, Method("::1", 80, "", 0, 2)),
        ("tcp://localhost:80", None, None, TORCHRUN, Method("localhost", 80, "", 3, 4)),
        ("tcp://127.0.0.1:0", 0, 1, {}, Method("127.0.0.1", 0, "", 0, 1)),
        ("file:///tmp/a b", 0, 2, {}, Method("", 0, "/tmp/a b", 0, 2)),
        ("file:///tmp/x?rank=1&world_size=2", None, None, {}, Method("", 0, "/tmp/x", 1, 2)),
    ],
)
def test_ways_to_meet(url, rank, size, env, expected):
    assert parse(url, rank, size, env) == expected


@pytest.mark.parametrize(
    ("url", "rank", "size", "env", "message"),
    [
        ("env://", None, 2, MASTER, "variable RANK is missing"),
        ("env://", 0, None, MASTER, "variable WORLD_SIZE is missing"),
        ("env://", 1, 2, {"MASTER_PORT": "1"}, "variable MASTER_ADDR is missing"),
        ("env://", 1, 2, {"MASTER_ADDR": "m"}, "variable MASTER_PORT is missing"),
        ("env://", None, None, {**TORCHRUN, "RANK": "-1"}, "variable RANK .*'-1'"),
        ("env://", None, None, {**TORCHRUN, "WORLD_SIZE": "four"}, "variable WORLD_SIZE .*'four'"),
        ("env://", 0, 2, {**MASTER, "MASTER_PORT": "http"}, "variable MASTER_PORT .*'http'"),
        ("env://", 0, 2, {**MASTER, "MASTER_PORT": "70000"}, "port 70000"),
        ("env://", 0, 2, {**MASTER, "MASTER_PORT": "0"}, "port 0"),
        ("tcp://h:1", None, 2, {}, "rank= .*is missing"),
        ("tcp://h:1", 0, None, {}, "world_size= .*is missing"),
        ("tcp://h:1?rank=0", 0, 2, {}, "rank is an argument"),
        ("tcp://h:1?world_size=2", 0, 2, {}, "world_size is an argument"),
        ("tcp://h:1?rank=x", None, 2, {}, "rank must be .*'x'"),
        ("tcp://h:1?rank=", None, 2, {}, "rank must be"),
        ("tcp://h:1", -1, 2, {}, "rank must be .*-1"),
        ("tcp://h:1", 2, 2, {}, "rank 2 is outside a world_size of 2"),
        ("tcp://h:1", 0, 0, {}, "world_size must be at least 1"),
        ("tcp://h", 0, 2, {}, "port"),
        ("tcp://h:", 0, 2, {}, "port"),
        ("tcp://h:99999", 0, 2, {}, "port"),
        ("tcp://h:x", 0, 2, {}, "port"),
        ("tcp://:80", 0, 2, {}, "host"),
        ("tcp://h:0", 0, 2, {}, "port 0"),
        ("tcp://224.0.0.1:80", 0, 2, {}, "multicast"),
        ("tcp://[::1:80", 0, 2, {}, "not a URL"),
        ("file://tmp/x", 0, 2, {}, "absolute path"),
        ("file://", 0, 2, {}, "absolute path"),
        ("mpi://", 0, 2, {}, "MPIBackend"),
        ("http://h:1", 0, 2, {}, "env://, file://, mpi://, tcp://"),
        ("nonsense", 0, 2, {}, "'nonsense' is not a known init_method"),
    ],
)
def test_what_is_wrong_is_named(url, rank, size, env, message):
    with pytest.raises(ss.InvalidArgumentError, match=message):
        parse(url, rank, size, env)


def test_arguments_reach_a_handler_in_the_query():
    assert with_query("x://y?a=b", 1, None) == "x://y?a=b&rank=1"
    assert with_query("x://y", None, None) == "x://y"


@pytest.mark.parametrize("variable", ["SAMESTEP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_interfaces_exist(variable):
    check_names({variable: "lo"})
    with pytest.raises(
        ss.InvalidArgumentError, match=rf"{variable} names the interface 'nic9', but there are .*lo"
    ):
        check_names({variable: "lo,nic9"})
