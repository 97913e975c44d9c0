"""What becomes of ranks whose peers on other hosts die, vanish, stop, come late or never, or are hard to reach.

The scenes play at the same time, each on hosts of its own, for most of them wait for a host that is silent.
"""

import os
import re
import signal
import time

import lab as labs
import pytest
from lab import FOUND_WITHIN_S, PATIENCE_S
from running import program

SCENES = {  # the program, and how many ranks each host has
    "a silent cable while all wait": (["lose_a_host_while", "all wait"], [1, 1]),
    "a silent cable while all work": (["lose_a_host_while", "all work"], [2, 2]),
    "a silent cable while all receive": (["lose_a_host_while", "all receive"], [1, 1]),
    "a lost carrier while all wait": (["lose_a_host_while", "all wait"], [2, 2]),
    "a lost carrier while all work": (["lose_a_host_while", "all work"], [1, 1]),
    "no power while all wait": (["lose_a_host_while", "all wait"], [1, 1]),
    "no power while all work": (["lose_a_host_while", "all work"], [1, 1]),
    "a killed rank while all wait": (["lose_a_host_while", "all wait"], [1, 1]),
    "a killed rank while all work": (["lose_a_host_while", "all work"], [2, 2]),
    "stopped": (["wait_for_a_stopped_rank"], [1, 1]),
    "busy": (["send_to_a_stopped_rank"], [1, 1]),
    "hard to reach": (["reduce_over_a_bad_link"], [1, 1]),
    "alone": (["start_alone"], [1, 1]),
    "late": (["start_late"], [1, 1]),
}
LATE_RANKS = {"alone": [1], "late": [1]}
CUT = [name for name in SCENES if name.startswith(("a silent", "a lost"))]
DEAD = [name for name in SCENES if name.startswith(("no power", "a killed"))]


class Stage:
    """All scenes, started."""

    def __init__(self):
        self.lab = labs.Lab(2 * len(SCENES))
        self.jobs = {}
        try:
            for number, (name, (words, n_each)) in enumerate(SCENES.items()):
                self.jobs[name] = labs.LabJob(
                    self.lab,
                    program("hosts/host_failures", *words),
                    n_each,
                    number=number,
                    first=2 * number,
                    late=LATE_RANKS.get(name, ()),
                )
            self.pids = {name: self._pids(name) for name in SCENES if name != "alone"}
            self.since = {}
            for number, name in enumerate(SCENES):
                self.since[name] = time.time()
                self._strike(name, 2 * number + 1)
        except BaseException:
            self.end()
            raise

    def _pids(self, name):
        return [found["pid"] for found in self.jobs[name].lines()]

    def _strike(self, name, host):
        if name.startswith(("a silent", "no power")):
            self.lab.drop(host)
        elif name.startswith("a lost"):
            self.lab.unplug(host)
        elif name == "hard to reach":
            self.lab.lose(host, percent=20)
        elif name == "stopped":
            os.kill(self.pids[name][1], signal.SIGSTOP)
        elif name == "late":
            self.jobs[name].join(1)
        if name in DEAD:
            os.kill(self.pids[name][-1], signal.SIGKILL)

    def end(self):
        for job in self.jobs.values():
            job.end()
        self.lab.close()


@pytest.fixture(scope="module")
def stage():
    if reason := labs.missing():
        pytest.skip(reason)
    made = Stage()
    yield made
    made.end()


def check_survivor(stage, name, rank, lost):
    job = stage.jobs[name]
    found = job.report(rank)
    assert any(f"rank {r} ({job.hosts[r]}) has left group 'world'" in found["text"] for r in lost), found
    assert any(f"from {job.hosts[r]} (10.78.0." in found["text"] for r in lost), found
    if not name.startswith("a killed"):
        assert re.search(r"has been silent for 8 s|No route to host|timed out", found["text"]), found
    assert found["at"] - stage.since[name] < FOUND_WITHIN_S
    assert job.report(rank) == {"ended": True}
    assert job.processes[rank].wait(PATIENCE_S) == 0


@pytest.mark.parametrize("name", CUT)
def test_a_cut_cable_is_found_on_both_sides(stage, name):
    job = stage.jobs[name]
    n = len(job.hosts)
    here, there = set(range(n // 2)), set(range(n // 2, n))
    for rank in range(n):
        if rank == n - 1 and "all wait" in name:
            continue  # it sleeps
        check_survivor(stage, name, rank, there if rank in here else here)


@pytest.mark.parametrize("name", DEAD)
def test_a_dead_rank_is_named_with_its_host(stage, name):
    job = stage.jobs[name]
    last = len(job.hosts) - 1
    for rank in range(last):
        check_survivor(stage, name, rank, {last})


def test_ranks_that_do_nothing_for_longer_than_a_host_may_be_silent_are_late_not_lost(stage):
    stopped, busy = stage.jobs["stopped"], stage.jobs["busy"]
    assert (
        f"for rank 1 ({stopped.hosts[1]}); arrived: rank 0 (" in stopped.report(0)["text"]
    )  # at its deadline of 12 s
    os.kill(stage.pids["busy"][1], signal.SIGCONT)  # its buffers have been full all the time
    assert busy.lines() == [{"ended": True}] * 2


def test_a_fifth_of_the_packets_lost_makes_nothing_wrong(stage):
    for found in stage.jobs["hard to reach"].lines():
        assert found.get("right") == 30 or "has left group 'world'" in found["lost"], found


def test_a_host_that_never_comes_is_named_with_the_place_to_meet(stage):
    text = stage.jobs["alone"].report(0)["text"]
    assert "rank 1 of 2 did not join at" in text
    assert "10.78.0." in text


def test_a_host_that_comes_late_is_waited_for(stage):
    job = stage.jobs["late"]
    job.report(1)
    assert job.lines() == [{"total": 3.0}] * 2
