"""Two processes that stay until their parent ends."""

import os
import signal
import time

import samestep.multiprocessing as mp

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def stay(i):
    os.write(1, b"here\n")  # at once: lines of two processes must not mix
    time.sleep(1000)


if __name__ == "__main__":
    mp.spawn(stay, nprocs=2)
