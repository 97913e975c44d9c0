"""Programs of test_launch_run.py and test_launch_terminal.py: what ranks get, print and read."""

import hashlib
import json
import os
import signal
import sys
import threading
import time

rank = os.environ["RANK"]


def print_variables(*names):
    print(json.dumps([os.environ.get(name) for name in names]))


def print_ranks_of_mpi():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    print(json.dumps([world.rank, int(rank), world.size, world.allreduce(world.rank)]))


def write_lines_in_pieces():
    def write(fd, name):
        for i in range(40):
            line = f"{name}{i:02d}-" + rank * (50 + 400 * (i % 20)) + "."
            line += "" if i == 39 else "\n"
            for k in range(0, len(line), 997):
                os.write(fd, line[k : k + 997].encode())

    threads = [threading.Thread(target=write, args=(fd, name)) for fd, name in ((1, "o"), (2, "e"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def println():
    import samestep as ss

    ss.println(ss.initialize(), "loss", "1 / 2")


def draw_a_progress_bar():
    if rank == "0":
        for i in range(1, 4):
            print(f"\r{i}/3", end="", file=sys.stderr)
            while not os.path.exists(f"seen{i}"):
                time.sleep(0.01)
        print("\nrank", 0, "has", "ended", file=sys.stderr)


def write_to_both_outputs():
    print("out", rank)
    print("err", rank, end="", file=sys.stderr)


def hash_of_input():
    print(json.dumps(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()))


def print_input():
    print(repr(sys.stdin.read()))


def read_one_line():
    if rank == "0":
        print(sys.stdin.readline().strip())


def write_much():
    for i in range(200_000):
        sys.stdout.write(f"{i:099d}\n")


def greet():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if rank == "0":
        print("hello", input("name? "))
    signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
