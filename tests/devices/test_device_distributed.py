"""samestep.distributed on device arrays: through NCCL, and through the host."""

import device_jobs
import pytest
from running import program


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_verbs_of_2019(tmp_path, backend):
    size = 3
    ended = device_jobs.run(
        tmp_path, program("devices/device_distributed", "use_each_operation", backend), size
    )
    for number, rank in enumerate(ended):
        assert rank.code == 0, ended
        start, reduced, parts, exchanged, wide, received, lists = rank.reports
        assert exchanged == {"mine": [float(number)] * 7, "parts": [[float(r)] * 7 for r in range(size)]}
        assert wide == {"wide": [[6.0] * 3] * 2}
        assert start["nccl"] is True
        assert reduced["sum"] == [6.0] * 7
        assert parts["parts"] == [[float(r)] * 7 for r in range(size)]
        assert received["received"] == [float((number - 1) % size)] * 3
        assert lists["lists"] == [[sum(10.0 * r + i for r in range(size) for i in range(2))] * 5] * 2


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("kinds", [["jax", "jax"], ["writable", "readonly"], ["readonly", "writable"]])
def test_arrays_that_cannot_be_written_stay_on_the_device(tmp_path, backend, kinds):
    """On every rank: those that receive go the way of those that only send."""
    use = program("devices/device_distributed", "use_arrays_that_cannot_be_written", backend, kinds)
    for number, rank in enumerate(device_jobs.run(tmp_path, use, 2)):
        writable, at_root = kinds[number] == "writable", number == 1
        broadcast = (2.0, not at_root)
        reduced, all_reduced = (3.0 if at_root else 1.0, at_root), (3.0, True)
        expected = [
            {
                "replaced": written and not writable,
                "kept": not (written and writable),
                "shape": True,
                "result": result,
                "nccl": int(backend == "nccl"),
            }
            for result, written in (broadcast, reduced, all_reduced)
            for _ in range(2)
        ]
        assert rank.reports == expected * 2, rank


@pytest.mark.parametrize("shapes", [[[6], [6]], [[2, 3], [6]]], ids=str)
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_averages_of_16_bits_go_through_nccl_in_each_form(tmp_path, library, shapes):
    average = program("devices/device_distributed", "average_16_bits", library, shapes)
    for number, rank in enumerate(device_jobs.run(tmp_path, average, 2)):
        reduced = 1.5 if number == 0 else 2.0
        assert rank.reports == [{"result": r, "nccl": 1} for r in (1.5, reduced) for _ in range(4)], rank
