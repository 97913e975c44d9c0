"""Connections between ranks of processes that may open few descriptors."""

import contextlib
import multiprocessing
import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import PATIENCE_S, Room, connect
from samestep._util import descriptors, strangers


def test_strangers_get_a_part_of_the_descriptors_beside_the_ranks():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        waiting = strangers.Strangers("a port", pytest.fail, n_expected=3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    links = [object() for _ in range(256 // 4 + 4)]
    assert [waiting.add(link) for link in links] == [None] * (256 // 4 + 3) + [links[0]]


@pytest.mark.parametrize(
    ("limit", "n_ranks", "then"),
    [(1024, 256, 1024), (1024, 340, 1192), (1024, 9000, 2000), (1000, 340, 1000)],
)
def test_the_usual_limit_is_raised_for_many_ranks_and_a_lower_one_is_kept(monkeypatch, limit, n_ranks, then):
    limits = [limit, 2000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.__setitem__(slice(None), both))
    descriptors.allow_for_ranks(n_ranks)
    assert limits == [then, 2000]


def _meet_with_few_descriptors(n_free, outcomes):
    """Three ranks in a process that may open `n_free` more descriptors."""
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1
    for held in range(3, used):  # the numbers below the limit that are free do not count
        with contextlib.suppress(OSError):
            os.fstat(held)
            continue
        os.dup2(0, held)
    room = Room(3)
    with ThreadPoolExecutor(3) as pool:
        pool.map(lambda rank: rank, range(3))  # threads are made before
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + n_free, hard))

        def act(rank):
            try:
                for link, *_ in connect(room, rank, timeout=20.0):
                    if link is not None:
                        link.close()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return "connected"

        outcomes.put(list(pool.map(act, range(3))))


@pytest.mark.slow
@pytest.mark.parametrize("n_free", [0, 3, 6, 9, 11, 12])
def test_too_few_descriptors_are_named_on_every_rank(n_free):
    context = multiprocessing.get_context("spawn")
    outcomes = context.Queue()
    process = context.Process(target=_meet_with_few_descriptors, args=(n_free, outcomes))
    process.start()
    answers = outcomes.get(timeout=PATIENCE_S)
    process.join()
    failed = [answer for answer in answers if answer != "connected"]
    assert (
        failed or n_free >= 11
    )  # 3 listeners, 3 selectors, 2 ends of 3 connections; one may close before the last opens
    for answer in failed:
        assert answer.startswith("UnavailableError: rank ")
        assert "Too many open files" in answer
        assert "raise `ulimit -n`" in answer
