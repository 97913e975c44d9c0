"""torch's optimizers over parameters in device memory, with a torch whose CUDA is a stand-in."""

import importlib.util
import os
import subprocess

import device_jobs
import fake_libraries
import pytest
import real_libraries
from running import RUN_COMMAND, program

pytestmark = pytest.mark.slow  # compiles against torch's headers


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    if real_libraries.wanted() or importlib.util.find_spec("torch") is None:
        pytest.skip("needs a torch to pretend CUDA to")
    import torch

    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA of its own")
    fake_libraries.build_torch()


@pytest.mark.parametrize("backend", ["nccl", "native"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_on_devices_are_those_on_the_host(tmp_path, backend, n):
    for rank in device_jobs.run(tmp_path, program("devices/device_torch", "train", backend), n):
        assert [found["same"] for found in rank.reports] == [[True] * 5], rank
        assert rank.reports[0]["none"] == [1] * 5, rank
        assert min(rank.reports[0]["largest"]) > 1, rank


@pytest.mark.parametrize(("at_once", "copies"), [(True, 1), (False, 200)])
def test_a_bucket_is_copied_by_one_kernel_where_torch_has_it(tmp_path, at_once, copies):
    for rank in device_jobs.run(tmp_path, program("devices/device_torch", "count_copies", 200, at_once), 2):
        assert rank.reports == [{"copies": [copies, copies, 0], "mean": [[2.0], [2.0, 2.0]]}], rank


@pytest.mark.parametrize("n", [1, 2, 3])
def test_trees_of_tensors_are_those_on_the_host(tmp_path, n):
    """Each dtype with several tensors is copied back by one kernel, averages of 16-bit floats by three in all.

    One rank copies none together, but for averages.
    """
    ranks = device_jobs.run(tmp_path, program("devices/device_torch", "trees"), n)
    for number, rank in enumerate(ranks):
        several = 0 if n == 1 else 3
        copies = {"sum": several, "avg": 4, "max": several, "bcast": 0 if number == n - 1 else 3}
        same = dict.fromkeys(copies, True)
        assert rank.reports == [{"same": same, "copies": copies}], rank


def test_ranks_whose_trees_differ_all_learn_it(tmp_path):
    """Also where the others' leaves are what most trees are made of. None counts as zeros, and an alias once."""
    for rank in device_jobs.run(tmp_path, program("devices/device_torch", "differ"), 3):
        ended, then = rank.reports[::2], rank.reports[1::2]
        assert [one.get("kind") for one in ended] == ["MismatchError"] * 4 + [None] * 2, rank
        assert all("leaf ['a'" in one["text"] for one in ended[:1]), rank
        assert all("leaf ['b'" in one["text"] for one in ended[1:4]), rank
        assert then == [{"then": [[3.0] * 2, [3.0] * 3]}] * 6, rank


def survivors(words, n, *values):
    """What each rank that was there at the end has printed, by who it is."""
    command = [*RUN_COMMAND, "-n", str(n), "--raw", "--min-ranks", "1", *words]
    env = os.environ | fake_libraries.environment(False) | {"PYTHONPATH": device_jobs.with_fakes()}
    env |= {"TEST_RANK": "0", "TEST_SIZE": "1", "TEST_FOLDER": ""}  # which this program does not use
    command += program("devices/device_torch", "survive", *values)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result ")]
    return {uid: rest for uid, *rest in lines}


def test_ranks_that_go_on_after_a_loss_keep_their_devices(tmp_path):
    """And NCCL, and the result; a rank that is started again has the device of the one before."""
    [(bits, steps, *_)] = survivors([], 1).values()
    left = survivors([], 4, ["0.0@5", "1.0@9"])
    assert left == {f"{i}.0": [bits, steps, "2.0", f"cuda:{i}", str(i)] for i in (2, 3)}
    again = survivors(["--max-restarts", "1"], 3, ["1.0@3"], str(tmp_path / "back"))
    assert again == {uid: [bits, steps, "3.0", f"cuda:{uid[0]}", uid[0]] for uid in ("0.0", "1.1", "2.0")}


def test_a_refused_gradient_leaves_the_others_as_they_were(tmp_path):
    [rank] = device_jobs.run(tmp_path, program("devices/device_torch", "refuse_one"), 1)
    assert "is a view of memory in which gradients are reduced" in rank.reports[0]["text"], rank
    assert rank.reports[1] == {"grad": [3.0] * 4}, rank
