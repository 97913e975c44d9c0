"""Programs of test_launch_ends.py: ranks that fail, hang, or do not listen to signals. Few import samestep."""

import json
import os
import signal
import subprocess
import sys
import time

rank = int(os.environ["RANK"])


def wait():
    print("ready")
    while True:
        signal.pause()


def ignore_signals():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def ignore_and_wait():
    print("pid", os.getpid())
    ignore_signals()
    wait()


def write_record(name, at):
    """As a rank does that ends with an exception."""
    record = {"time": at, "class": name, "rank": rank, "text": "", "pid": os.getpid()}
    with open(os.environ["SAMESTEP_ERROR_FILE"], "w") as file:
        json.dump(record, file)


def exit_with_7():
    if rank == 1:
        print("why", file=sys.stderr)
        sys.exit(7)
    wait()


def exit_with_9():
    sys.exit(9)


def raise_in_a_group():
    import samestep as ss

    world = ss.initialize()
    if rank == 1:
        raise ValueError("on purpose")
    world.barrier()


def miss_rank_1(how):
    """Rank 1 has left, or hangs."""
    import samestep as ss

    world = ss.initialize(timeout=10)
    if rank == 1:
        sys.exit(0) if how == "left" else wait()
    world.barrier(timeout=3)


def fail_on_the_second_node():
    import samestep as ss

    world = ss.initialize(timeout=60)
    print("ready")
    assert world.allgather_object(rank) == [0, 1, 2, 3]  # the nodes share a secret that nobody has set
    if rank == 3:
        os._exit(5)
    world.barrier()


def be_killed(name):
    if rank == 1:
        os.kill(os.getpid(), signal.Signals[name])
    wait()


def abort_on_a_line_of_input():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready")
    if rank == 0 and sys.stdin.readline():
        os.kill(os.getpid(), signal.SIGABRT)
    wait()


def exit_first_in_consequence():
    """Rank 1 fails but does not exit; rank 0 notices that, and exits."""
    if rank == 1:
        write_record("builtins.ValueError", time.time())
        os.mkdir("failed")
        wait()
    while not os.path.exists("failed"):
        time.sleep(0.01)
    write_record("samestep.PeerLostError", time.time())
    sys.exit(1)


def exit_late_as_the_cause():
    """Rank 0 notices the failure of rank 1 before rank 1 has exited."""
    if rank == 0:
        write_record("samestep.PeerLostError", time.time())
        sys.exit(1)
    time.sleep(0.3)  # being slow is what is tested
    sys.exit(5)


def exit_all_in_consequence():
    write_record("samestep.TimeoutError", 100 - rank)
    sys.exit(1)


def leave_children(fails):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if fails:
        if rank == 1:
            sys.exit(3)
        wait()


def end_by_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wait()


def clean_up_after_ctrl_c():
    try:
        wait()
    except KeyboardInterrupt:
        print("cleaned up")


def wait_in_a_barrier():
    import samestep as ss

    world = ss.initialize()
    print("ready")
    if rank == 0:
        time.sleep(60)
    world.barrier()


def report_ctrl_c_and_go_on():
    ignore_signals()
    signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
    wait()


def leave_rank_1_alone():
    if rank == 1:
        wait()


def print_and_wait(text):
    print(text)
    wait()


def call_mpi_abort():
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    if rank == 1:
        print("last words" + "." * 30_000)
        MPI.COMM_WORLD.Abort(7)
    wait()


def fail_twice():
    attempt = int(os.environ["SAMESTEP_RESTART_COUNT"])
    print("attempt", attempt, "of", rank, flush=True)
    if attempt < 2:
        if rank == 1:
            sys.exit(7 + attempt)
        wait()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
