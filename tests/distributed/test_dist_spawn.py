"""`samestep.multiprocessing.spawn`: results, failures, ends."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
import samestep.multiprocessing as mp
from samestep.launch import network

FOR_EVER = 1000.0


def put(i, queue, word):
    queue.put((i, word, os.getpid(), os.environ.get("RANK")))


def train(i, port, queue):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=i, world_size=3)
    x = np.full(3, float(i))
    dist.all_reduce(x)
    queue.put(x[0])


def act(i, *acts):
    """Each process does what its entry says."""
    kind, _, value = acts[i].partition(" ")
    if kind == "raise":
        raise KeyError(value)
    if kind == "lose":
        raise ss.PeerLostError(value)
    if kind == "exit":
        sys.exit(int(value))
    if kind == "die":
        os.kill(os.getpid(), int(value))
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind in ("wait", "deaf"):
        time.sleep(FOR_EVER)


def act_after(i, event, acts):
    """The last process acts when `event` is set by the one before, which acts right after that."""
    if i == len(acts) - 1:
        event.wait()
    elif i == len(acts) - 2:
        event.set()
    act(i, *acts)


def children():
    return [child for child in multiprocessing.active_children() if child.is_alive()]


def test_each_process_gets_its_index_and_the_arguments():
    queue = multiprocessing.get_context("spawn").Queue()
    assert mp.spawn(put, args=(queue, "word"), nprocs=3) is None
    got = sorted(queue.get() for _ in range(3))
    assert [entry[:2] for entry in got] == [(0, "word"), (1, "word"), (2, "word")]
    assert len({entry[2] for entry in got} | {os.getpid()}) == 4
    assert {entry[3] for entry in got} == {os.environ.get("RANK")}
    assert not children()


def test_a_job_of_three():
    queue = multiprocessing.get_context("spawn").Queue()
    with network.reserve_port() as holder:
        mp.spawn(train, args=(holder.getsockname()[1], queue), nprocs=3)
    assert [queue.get() for _ in range(3)] == [3.0] * 3


def test_without_join():
    gate = multiprocessing.get_context("spawn").Event()
    context = mp.spawn(act_after, args=(gate, ("", "wait", "")), nprocs=3, join=False)
    assert len(set(context.pids())) == 3
    assert context.join(timeout=0.01) is False
    os.kill(context.pids()[1], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(mp.ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
            context.join()
    assert not children()
    context = mp.spawn(act, args=("", ""), nprocs=2, join=False)
    assert context.join(60) is True
    assert context.join() is True


def test_what_a_function_raises_is_raised_with_its_traceback():
    with pytest.raises(mp.ProcessRaisedException) as caught:
        mp.spawn(act, args=("wait", "raise the key", "wait"), nprocs=3)
    error, text = caught.value, str(caught.value)
    assert text.startswith("\n\n-- Process 1 terminated with the following error:\nTraceback")
    assert "in act\n" in text
    assert "KeyError: 'the key'" in text
    assert (error.error_index, error.pid) == (1, error.error_pid)
    assert isinstance(error, mp.ProcessException | ss.Error)
    assert isinstance(error, RuntimeError)
    assert not children()


@pytest.mark.parametrize(
    ("word", "text", "code", "name"),
    [
        ("exit 3", "process 0 terminated with exit code 3", 3, None),
        ("die 9", "process 0 terminated with signal SIGKILL", -9, "SIGKILL"),
        *(
            pytest.param(
                f"die {n}", f"process 0 terminated with signal {name}", -n, name, marks=pytest.mark.slow
            )
            for n, name in [(11, "SIGSEGV"), (15, "SIGTERM")]
        ),
    ],
)
def test_how_a_process_has_exited(word, text, code, name):
    with pytest.raises(mp.ProcessExitedException) as caught:
        mp.spawn(act, args=(word, "wait"), nprocs=2)
    error = caught.value
    assert (str(error), error.exit_code, error.signal_name, error.error_index) == (text, code, name, 0)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert type(again) is type(error)


def leave_early(i, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=i, world_size=3)
    if i == 1:
        sys.exit(0)
    dist.barrier()


def test_a_process_that_leaves_well_while_others_wait_for_it_is_the_cause():
    with (
        network.reserve_port() as holder,
        pytest.raises(
            mp.ProcessExitedException, match=r"while others still waited for it; process [02]"
        ) as caught,
    ):
        mp.spawn(leave_early, args=(holder.getsockname()[1],), nprocs=3)
    assert (caught.value.error_index, caught.value.exit_code) == (1, 0)
    assert "PeerLostError" in str(caught.value)
    assert not children()


class Telling(Exception):
    """Lets another process fail when this has been raised already, and its time noted."""

    def __init__(self, event):
        super().__init__()
        self.event = event

    def __str__(self):
        self.event.set()
        return "the first"


def one_after_the_other(i, event):
    if i == 1:
        raise Telling(event)
    event.wait()
    raise KeyError(i)


def test_the_first_failure_in_time_is_the_one():
    event = multiprocessing.get_context("spawn").Event()
    context = mp.spawn(one_after_the_other, args=(event,), nprocs=3, join=False)
    for pid in context.pids():
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(mp.ProcessRaisedException, match="Telling: the first") as caught:
        context.join()
    assert caught.value.error_index == 1


@pytest.mark.slow
def test_a_consequence_is_not_the_cause():
    event = multiprocessing.get_context("spawn").Event()
    with pytest.raises(mp.ProcessExitedException, match="process 2 terminated with exit code 4"):
        mp.spawn(act_after, args=(event, ("wait", "lose rank 2", "exit 4")), nprocs=3)
    with pytest.raises(mp.ProcessRaisedException, match="PeerLostError: rank 7"):
        mp.spawn(act, args=("wait", "lose rank 7"), nprocs=2)


def test_who_does_not_hear_sigterm_is_killed_after_the_grace_period():
    context = mp.spawn(act, args=("deaf", "deaf", "exit 1"), nprocs=3, join=False)
    with pytest.raises(mp.ProcessExitedException):
        context.join(grace_period=0.1)
    assert not children()


def test_keyboard_interrupt_in_a_process_is_no_failure(capfd):
    assert mp.spawn(act, args=("interrupt", ""), nprocs=2) is None
    assert capfd.readouterr().err == ""


def test_wrong_arguments_start_nothing():
    wrong = [
        (ss.InvalidArgumentError, "nprocs", (act, (), 0)),
        (TypeError, "nprocs", (act, (), "2")),
        (ss.InvalidArgumentError, "start_method", (act, (), 1, True, False, "fork")),
        (ss.InvalidArgumentError, "fn cannot be pickled", (lambda i: i,)),
        (ss.InvalidArgumentError, "args cannot be pickled", (act, (lambda: 0,))),
        (TypeError, "fn must be", (3,)),
        (TypeError, "args must be", (act, "ab")),
    ]
    for kind, text, arguments in wrong:
        with pytest.raises(kind, match=text):
            mp.spawn(*arguments)
    assert not children()


def test_importing_it_is_cheap():
    program = "import sys, samestep.multiprocessing; print(*sys.modules)"
    found = set(subprocess.check_output([sys.executable, "-c", program], text=True).split())
    assert not found & {"torch", "jax", "mpi4py"}
