"""JAX on a GPU, by its stand-in: results lie in JAX's own memory, and inputs are waited for by streams."""

from __future__ import annotations

import device_jobs
import pytest
from running import program

backends = pytest.mark.parametrize("backend", ["nccl", "native"])


@backends
@pytest.mark.parametrize("n", [1, 2, 3])
def test_results_are_arrays_of_jax_in_memory_of_its_pool(tmp_path, backend, n):
    ended = device_jobs.run(tmp_path, program("devices/device_jax", "use_jax_arrays", backend), n)
    for one in ended:
        assert one.reports == [{"wrong": 0, "allocated": 0, "waits_on_host": 0}], ended


@backends
def test_a_call_returns_before_its_input_is_computed(tmp_path, backend):
    begin = program("devices/device_jax", "begin_before_the_input_is_computed", backend)
    ended = device_jobs.run(tmp_path, begin, 2)
    assert [one.reports for one in ended] == [[{"right": True}]] * 2, ended


@backends
def test_a_call_with_a_new_result_returns_before_its_input_is_computed(tmp_path, backend):
    begin = program("devices/device_jax", "begin_without_an_output_before_the_input_is_computed", backend)
    for one in device_jobs.run(tmp_path, begin, 2):
        assert one.reports == [{"waiting": True, "right": True, "arrays": True}], one


@backends
def test_inputs_that_are_given_away_meanwhile(tmp_path, backend):
    for one in device_jobs.run(tmp_path, program("devices/device_jax", "donate_inputs", backend), 2):
        assert one.reports == [{"wrong": 0}], one


@pytest.mark.parametrize("jax_is_first", [False, True])
def test_jax_makes_arrays_on_the_device_of_the_rank(tmp_path, jax_is_first):
    find = program("devices/device_jax", "find_the_device", jax_is_first, "")
    for rank, one in enumerate(device_jobs.run(tmp_path, find, 2, FAKE_GPU_DEVICES="2")):
        seen = [0, 1] if jax_is_first else [rank]  # it had its devices
        assert one.reports == [{"result": True}, {"seen": seen, "used": rank}], one


def test_jax_sees_what_the_user_says(tmp_path):
    find = program("devices/device_jax", "find_the_device", False, "1,0")
    for one in device_jobs.run(tmp_path, find, 2, FAKE_GPU_DEVICES="2", SAMESTEP_TIMEOUT="5"):
        assert one.reports[1]["seen"] == [1, 0], one


def test_under_samestep_run_jax_sees_the_device_of_the_rank(tmp_path):
    """Also where JAX has its devices first."""
    find = program("devices/device_jax", "find_the_device", True, "")
    of_rank = {
        r: {"LOCAL_RANK": str(r), "RANK": str(r), "WORLD_SIZE": "2", "SAMESTEP_LAUNCHER": "samestep"}
        for r in range(2)
    }
    for rank, one in enumerate(device_jobs.run(tmp_path, find, 2, of_rank=of_rank, FAKE_GPU_DEVICES="2")):
        assert one.reports == [{"result": True}, {"seen": [rank], "used": rank}], one


@backends
def test_new_arrays_are_complete_when_they_are_handed_on(tmp_path, backend):
    scatter = program("devices/device_jax", "scatter_to_new_arrays", backend)
    for one in device_jobs.run(tmp_path, scatter, 2, FAKE_GPU_DELAY_US="300"):
        assert one.reports == [{"wrong": 0}], one
