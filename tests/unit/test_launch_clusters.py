"""What cluster systems tell their containers, and what `samestep run` makes of it."""

import pytest
from samestep.launch.arguments import parse
from samestep.launch.clusters import Nodes, nodes

PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0.svc", "PET_MASTER_PORT": "29400"}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
BATCH = {"AWS_BATCH_JOB_NUM_NODES": "3", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1"}
MAIN = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n", "SKYPILOT_NODE_RANK": "1"}
JAX = {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3", "JAX_COORDINATOR_ADDRESS": "job-0.svc:6666"}


@pytest.mark.parametrize(
    ("env", "hostname", "n_nodes", "found"),
    [
        (PET, "h", None, Nodes("PET_NNODES", 2, 1, "job-0.svc", 29400)),
        ({**PET, "PET_NPROC_PER_NODE": "3"}, "h", None, Nodes("PET_NNODES", 2, 1, "job-0.svc", 29400, 3)),
        ({**PET, "PET_NPROC_PER_NODE": "auto"}, "h", None, Nodes("PET_NNODES", 2, 1, "job-0.svc", 29400)),
        ({**PET, "PET_NNODES": "2:2"}, "h", None, Nodes("PET_NNODES", 2, 1, "job-0.svc", 29400)),
        ({"PET_NNODES": "1"}, "h", None, None),
        (JAX, "h", None, Nodes("JAX_NUM_PROCESSES", 4, 3, "job-0.svc")),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "[fd00::1]:6"}, "h", None, Nodes("JAX_NUM_PROCESSES", 4, 3, "fd00::1")),
        (SAGEMAKER, "algo-2", None, Nodes("SageMaker", 2, 1, "algo-1")),
        ({**BATCH, **MAIN, "AWS_BATCH_JOB_NODE_INDEX": "2"}, "h", None, Nodes("AWS Batch", 3, 1, "10.0.0.7")),
        ({**BATCH, **MAIN, "AWS_BATCH_JOB_NODE_INDEX": "0"}, "h", None, Nodes("AWS Batch", 3, 2, "10.0.0.7")),
        ({**BATCH, "AWS_BATCH_JOB_NODE_INDEX": "1"}, "main", None, Nodes("AWS Batch", 3, 0, "main")),
        (SKY, "h", None, Nodes("SkyPilot", 2, 1, "10.0.0.1")),
        ({"JOB_COMPLETION_INDEX": "12"}, "job-12.svc.ns", 16, Nodes("Kubernetes", 16, 12, "job-0.svc.ns")),
        ({"JOB_COMPLETION_INDEX": "1"}, "set-worker-0-1.set", 2, Nodes("Kubernetes", 2, 1, "set-worker-0-0.set")),
        ({"JOB_COMPLETION_INDEX": "1"}, "job-1", None, None),
        ({"SM_HOSTS": "", "SM_CURRENT_HOST": ""}, "h", None, None),
        ({}, "h", 4, None),
    ],
)  # fmt: skip
def test_each_system_tells_its_nodes(env, hostname, n_nodes, found):
    assert nodes(env, hostname, n_nodes) == found


@pytest.mark.parametrize(
    ("env", "hostname", "text"),
    [
        ({**PET, "PET_NNODES": "1:4"}, "h", "PET_NNODES=1:4: the number of nodes cannot change"),
        ({**PET, "PET_NODE_RANK": "2"}, "h", "PET_NNODES: node 2 is outside the 2 nodes"),
        ({**PET, "PET_NODE_RANK": "-1"}, "h", "PET_NODE_RANK=-1 is not a number"),
        ({**PET, "PET_NPROC_PER_NODE": "many"}, "h", "PET_NPROC_PER_NODE=many"),
        ({**PET, "PET_MASTER_PORT": "0"}, "h", "PET_MASTER_PORT=0 is not a port"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "x"}, "h", "SM_CURRENT_HOST=x"),
        ({**SAGEMAKER, "SM_HOSTS": "a,b"}, "h", "SM_HOSTS=a,b"),
        ({"JOB_COMPLETION_INDEX": "1"}, "elsewhere", "give --node-rank and --master-addr"),
    ],
)
def test_variables_that_cannot_be_used_are_named(env, hostname, text):
    with pytest.raises(ValueError) as error:
        nodes(env, hostname, 2)
    assert text in str(error.value)


def test_a_command_line_is_completed():
    options = parse(["train.py"], {**PET, "PET_NPROC_PER_NODE": "3"})
    assert (options.n_ranks, options.n_nodes, options.node_rank) == (3, 2, 1)
    assert (options.master_addr, options.master_port, options.cluster) == ("job-0.svc", 29400, "PET_NNODES")
    assert parse(["-n", "2", "train.py"], SAGEMAKER).master_port == 29500


@pytest.mark.parametrize("words", [["--nnodes", "1"], ["--hosts", "a:2"], ["--mpi"]])
def test_the_command_line_wins(words):
    options = parse(["-n", "2", *words, "train.py"], PET)
    assert (options.n_nodes, options.node_rank, options.cluster) == (1, 0, "")


def test_other_flags_win_one_by_one():
    options = parse(["-n", "2", "--master-addr", "a", "--master-port", "7", "x"], PET)
    assert (options.n_nodes, options.master_addr, options.master_port) == (2, "a", 7)


@pytest.mark.parametrize(
    ("words", "env", "text"),
    [
        (["--nnodes", "3"], PET, "--nnodes 3, but PET_NNODES says 2"),
        ([], {**PET, "PET_MASTER_ADDR": ""}, "--nnodes needs --master-addr"),
        ([], {**PET, "PET_NODE_RANK": "7"}, "node 7 is outside"),
    ],
)
def test_contradictions_end_the_run(words, env, text, capsys):
    with pytest.raises(SystemExit):
        parse(["-n", "2", *words, "x"], env)
    assert text in capsys.readouterr().err
