"""The same command on every host, as a cluster system runs a container's: it alone distinguishes the hosts."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from lab import PATIENCE_S

MANIFESTS = Path(__file__).parents[2] / "examples" / "cluster"
PROGRAM = Path(__file__).parent / "programs" / "cluster_ranks.py"
IPS = ["10.78.0.1", "10.78.0.2"]

SYSTEMS = {
    "kubeflow torch": lambda i: {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": str(i),
        "PET_MASTER_ADDR": "node0",
        "PET_MASTER_PORT": "29400",
    },
    "kubeflow jax": lambda i: {
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(i),
        "JAX_COORDINATOR_ADDRESS": "node0:6666",
    },
    "sagemaker": lambda i: {"SM_HOSTS": '["node1", "node0"]', "SM_CURRENT_HOST": f"node{i}"},
    "aws batch": lambda i: {
        "AWS_BATCH_JOB_NUM_NODES": "2",
        "AWS_BATCH_JOB_NODE_INDEX": str(i),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": IPS[0] if i else "",
    },
    "skypilot": lambda i: {"SKYPILOT_NODE_IPS": "\n".join(IPS), "SKYPILOT_NODE_RANK": str(i)},
    "kubernetes": lambda i: {"JOB_COMPLETION_INDEX": str(i)},
}


@pytest.fixture
def containers(lab):
    """Runs one command on two hosts, each with the variables of its own; returns what they print."""
    started = []

    def begin(variables, *words, secret="x"):
        for i in range(2):
            named = ["unshare", "--uts", "sh", "-c", f'hostname train-{i}.ring && exec "$@"', "-"]
            command = [*named, sys.executable, "-m", "samestep", "run", "--raw", *words, str(PROGRAM)]
            own = {"MASTER_PORT": "", "HOME": "/nonexistent", "XDG_CONFIG_HOME": "", **variables(i)}
            own |= {"SAMESTEP_SECRET": secret} if secret else {}
            started.append(lab.start(f"node{i}", command, start_new_session=True, env=own))
        return [process.communicate(timeout=PATIENCE_S)[0] for process in started]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)


def reports(texts):
    lines = [line for text in texts for line in text.splitlines() if line.startswith("{")]
    return sorted((json.loads(line) for line in lines), key=lambda report: report["rank"])


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_cluster_system_tells_who_is_who(containers, system):
    words = {"kubeflow torch": [], "kubernetes": ["-n", "2", "--nnodes", "2"]}.get(system, ["-n", "2"])
    texts = containers(SYSTEMS[system], *words)
    expected = [
        {"rank": rank, "host": f"train-{rank // 2}", "node": rank // 2, "total": 10.0} for rank in range(4)
    ]
    assert reports(texts) == expected, texts
    for i, text in enumerate(texts):
        assert f"node {i} of 2, and node 0 is " in text


@pytest.mark.parametrize(
    ("manifest", "system"),
    [
        ("kubernetes-job.yaml", "kubernetes"),
        ("jobset.yaml", "kubernetes"),
        ("kubeflow-trainjob.yaml", "kubeflow torch"),
    ],
)
def test_the_commands_of_the_manifests(containers, manifest, system):
    line = next(line for line in (MANIFESTS / manifest).read_text().splitlines() if "command:" in line)
    samestep, run, *words, program = json.loads(line.partition(":")[2])
    assert [samestep, run, program] == ["samestep", "run", "/app/train.py"]
    texts = containers(SYSTEMS[system], *words)
    assert [report["total"] for report in reports(texts)] == [10.0] * 4, texts


def test_containers_without_a_secret_start_with_a_warning(containers):
    texts = containers(SYSTEMS["sagemaker"], "-n", "1", secret="")
    assert [report["total"] for report in reports(texts)] == [3.0, 3.0], texts
    assert all("warning: the job has no secret" in text and "SageMaker" in text for text in texts)


def test_one_node_alone_where_the_user_says_so(containers):
    texts = containers(SYSTEMS["sagemaker"], "-n", "1", "--nnodes", "1")
    assert [report["total"] for report in reports(texts)] == [1.0, 1.0], texts
