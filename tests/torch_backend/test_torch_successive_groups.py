"""Processes that make one group of torch after another: what libraries do that restart with fewer or more ranks."""

import json
import signal
import subprocess
import sys

import pytest
from running import script

dist = pytest.importorskip("torch.distributed")

PROGRAM = script("torch_backend/successive_groups")
LIMIT_S = 120


def results(function, *arguments, n_ranks=3, env, dies=()):
    """What each of the ranks prints; None for one that has killed itself."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [json.dumps(argument) for argument in arguments]
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, function, str(store.port), str(rank), *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    try:
        printed = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    expected = [-signal.SIGKILL if rank in dies else 0 for rank in range(n_ranks)]
    assert [rank.returncode for rank in ranks] == expected, printed
    return [None if rank in dies else json.loads(out) for rank, (out, _) in enumerate(printed)]


@pytest.fixture(params=["shm", "tcp"])
def transport(request, environment):
    return environment | {"SAMESTEP_NATIVE_TRANSPORT": request.param, "SAMESTEP_TRUST_NETWORK": "1"}


def test_groups_of_other_sizes_follow_each_other_and_leave_nothing_behind(transport):
    sizes = [3, 2, 1, 3, 1, 2] * 4
    for rank, found in enumerate(results("left_by_all", sizes, env=transport)):
        assert [size for size, *_ in found] == [size for size in sizes if rank < size]
        for size, sums, _ in found:
            assert sums == [[size * (size + 1) / 2]] * 2
        threes = [held for size, _, held in found if size == 3]
        # Over TCP a rank may free a group one or two groups later, when it has learned that the others have left.
        slack = [2 * 3, 0, 0] if transport["SAMESTEP_NATIVE_TRANSPORT"] == "tcp" else [0, 0, 0]
        assert all(
            now <= then + more for now, then, more in zip(threes[-1], threes[0], slack, strict=True)
        ), threes


def test_groups_in_which_an_operation_has_failed_leave_nothing_behind(transport):
    n_groups = 8
    everywhere = results("fails_each_time", n_groups, env=transport, dies={2})
    for rank, found in enumerate(everywhere[:2]):
        texts = [text for text, _ in found[:n_groups]]
        for number, text in enumerate(texts[:-1]):
            assert rank == 0 or f"rank 0 has left group 'group {number}': it called abort" in text
        assert "rank 2" in texts[-1]
        sums, _ = found[n_groups]
        assert sums == [[3.0]] * 2
        held = [held for _, held in found[1:n_groups]]
        slack = [2 * 3, 0, 0] if transport["SAMESTEP_NATIVE_TRANSPORT"] == "tcp" else [0, 0, 0]
        assert all(now <= then + more for now, then, more in zip(held[-1], held[0], slack, strict=True)), held
