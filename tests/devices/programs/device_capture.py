"""Programs of test_graph_capture.py: operations outside, around and inside of captures of streams into graphs."""

import ctypes
import json
import sys

import fake_arrays
import numpy as np
import samestep as ss
from device_rank import attempt, rank, report, start
from fake_arrays import DEFAULT, Array, Graph, Stream


def capture_while_an_operation_is_in_progress(backend, mode):
    """The operation ends while the capture continues, and is waited for meanwhile."""
    world = start(backend)
    stream, other = Stream(), Stream()
    x = Array.of(np.full(100, rank + 1.0), stream)
    y, z = Array.of(np.full(5, 7.0), other), Array.of(np.zeros(5), other)
    stream.synchronize()
    other.synchronize()
    fake_arrays.runtime().fakeHold(ctypes.c_void_p(stream.handle))
    work = world.iallreduce(x)
    with Graph(other, mode) as graph:
        z._copy(z.address, y.address)
        fake_arrays.runtime().fakeRelease(ctypes.c_void_p(stream.handle))
        work.wait(host=True)
        world.iallreduce(x).wait(host=True)
    graph.launch(other)
    report(result=z.get().tolist(), reduced=float(world.allreduce(x).get()[0]))
    world.close()


def call_inside_of_a_capture(backend):
    """Only rank 0 does it, so that a call that tells other ranks anything is found out."""
    world = start(backend)
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    y = Array.of(np.zeros(6), stream)
    stream.synchronize()
    if rank == 0:
        with Graph(stream):
            attempt(lambda: world.allreduce(x) and None)
            attempt(lambda: world.iallgather(x, out=y) and None)
            attempt(lambda: world.isend(x, 1) and None)
            attempt(lambda: world.allreduce_tree({"a": x}) and None)
            attempt(lambda: ss.synchronize(world, {"a": x}) and None)
            attempt(lambda: world.allreduce_multi([x]) and None)
    report(result=world.allreduce(x).get().tolist())
    world.close()


def wait_inside_of_a_capture(backend):
    world = start(backend)
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    work = world.iallreduce(x)
    with Graph(stream):
        work.wait()
        x._copy(x.address, x.address)
    report(result=x.get().tolist())
    world.close()


def use_the_default_stream_while_another_is_captured(backend):
    """Streams made without flags wait for the default stream, which would therefore end their capture."""
    world = start(backend)
    x = Array.of(np.full(3, rank + 1.0), DEFAULT)
    DEFAULT.synchronize()
    if rank == 0:
        with Graph(Stream(), fake_arrays.THREAD_LOCAL):
            attempt(lambda: world.allreduce(x) and None)
    report(result=world.allreduce(x).get().tolist())
    world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
