"""What programs of ranks with fake devices share; see device_jobs.py."""

import json
import os
import threading
import time
from pathlib import Path

import fake_arrays
import real_libraries
import samestep as ss

rank, size, folder = int(os.environ["TEST_RANK"]), int(os.environ["TEST_SIZE"]), os.environ["TEST_FOLDER"]


def store(name="store"):
    return f"file://{folder}/{name}"


def start(backend="nccl", timeout=30.0, *, only=True, **more):
    made = ss.initialize(backend, init_method=store(), rank=rank, world_size=size, timeout=timeout, **more)
    if only:
        use_only(made.device)
    return made


def use_only(device):
    """From here on the process ends where it has a context of another device."""
    if device is not None and not real_libraries.wanted():
        fake_arrays.runtime().fakeOnlyDevice(device)


def report(**found):
    os.write(1, ("\0" + json.dumps(found) + "\n").encode())


def attempt(act):
    """Reports the result of `act()`, or its error and when it came."""
    begin = time.monotonic()
    try:
        report(result=act())
    except Exception as error:
        report(kind=type(error).__name__, text=str(error), seconds=time.monotonic() - begin)


def meet(name):
    """All ranks come here, by files: the package hears nothing of it."""
    Path(folder, f"{name}-{rank}").touch()
    while any(not Path(folder, f"{name}-{other}").exists() for other in range(size)):
        time.sleep(0.001)


def release_soon(*streams):
    """Lets a thread release the streams a little later. The event is set before."""
    released = threading.Event()

    def release():
        released.set()
        for stream in streams:
            stream.release()

    threading.Timer(0.3, release).start()
    return released
