"""Trees of many device arrays, which NCCL gets in groups."""

from __future__ import annotations

import device_jobs
import pytest
from running import program


@pytest.mark.parametrize("in_progress", ["", "3"])
def test_trees_are_exact(tmp_path, in_progress):
    """With more leaves than one group takes; also where NCCL enqueues its work after its call has returned."""
    variables = {"FAKE_NCCL_IN_PROGRESS": in_progress, "FAKE_GPU_DELAY_US": "300"}
    ended = device_jobs.run(tmp_path, program("devices/trees", "reduce_trees"), 2, **variables)
    for rank in ended:
        assert len(rank.reports) == 1, ended
        assert set(rank.reports[0].values()) == {0}, rank


def test_ranks_that_do_not_agree_on_a_tree_all_learn_it(tmp_path):
    """Who waits on the host learns it there; for the other rank only a stream waits, and its next call says so."""
    waits, stays = device_jobs.run(tmp_path, program("devices/trees", "disagree_at_a_tree"), 2)
    assert [one.get("kind") for one in waits.reports] == ["MismatchError"] * 2, waits
    assert stays.reports[-1]["kind"] == "MismatchError", stays
    assert all(one.get("seconds", 0.0) < 20 for one in waits.reports + stays.reports)


@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_leaves_that_share_memory_in_part_are_refused(tmp_path, backend):
    """By all ranks, before they compare anything. One array may stand in several places, as in host memory."""
    for rank in device_jobs.run(tmp_path, program("devices/trees", "overlapping_leaves", backend), 2):
        *refused, last = rank.reports
        assert [one.get("kind") for one in refused] == ["InvalidArgumentError"] * 3, rank
        for one, leaves in zip(
            refused, ["leaf ['a'] and leaf ['c']"] * 2 + ["leaf [0] and leaf [1]"], strict=True
        ):
            assert f"{leaves} share device memory" in one["text"], rank
            assert one["seconds"] < 5, rank
        assert last == {"result": [0.0, 2.0, 4.0, 6.0, 8.0]}, rank
