"""Programs of test_graph_capture.py: operations outside, around and inside of captures of streams into graphs."""

import contextlib
import ctypes
import json
import os
import sys
import time

import fake_arrays
import numpy as np
import samestep as ss
from device_rank import attempt, rank, report, size, start
from fake_arrays import DEFAULT, Array, ConvertingArray, Graph, Stream
from samestep.distributed import lists
from samestep.gpu import runtime as gpus
from samestep.gpu.device_array import DeviceArray


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
    """On all ranks alike, after which the group continues."""
    world = start(backend)
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    y = Array.of(np.zeros(6), stream)
    stream.synchronize()
    with Graph(stream):
        attempt(lambda: world.allreduce(x) and None)
        attempt(lambda: world.iallgather(x, out=y) and None)
        attempt(lambda: world.isend(x, 1) and None)
        attempt(lambda: world.allreduce_tree({"a": x}) and None)
        attempt(lambda: ss.synchronize(world, {"a": x}) and None)
        attempt(lambda: lists.Call(world, "all_reduce_multigpu", [x], "tensor_list") and None)
    report(result=world.allreduce(x).get().tolist())
    world.close()


def replay():
    """A graph with operations of each form is launched with other elements each time."""
    world = start("nccl")
    stream = Stream()
    given = Array.of(np.zeros(3), stream)
    x, y, leaf = (Array.of(np.zeros(n), stream) for n in (3, 3 * size, 3))
    half = ConvertingArray.of(np.zeros(3, "float16"), stream)
    world.allreduce(x)
    stream.synchronize()
    with Graph(stream, fake_arrays.RELAXED) as graph:  # in which a library of arrays allocates, too
        x._copy(x.address, given.address)
        world.allreduce(x)
        world.iallgather(x, out=y).wait()
        leaf._copy(leaf.address, given.address)
        world.allreduce_tree({"a": leaf}, "max")
        world.allreduce(half, "avg")
        world.allreduce_tree([half], "avg")
    for turn in range(3):
        given.set(np.full(3, 10.0 * turn + rank))
        half.set(np.full(3, turn + rank, "float16"))
        graph.launch(stream)
        report(x=x.get().tolist(), y=y.get().tolist(), leaf=leaf.get().tolist(), half=half.get().tolist())
        report(between=float(world.allreduce(Array.of(np.ones(1), stream)).get()[0]))
    world.close()


def close_while_a_graph_exists(deletes):
    world = start("nccl")
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    with Graph(stream) as graph:
        world.allreduce(x)
    graph.launch(stream)
    report(result=x.get().tolist())
    if deletes:
        fake_arrays.call("GraphExecDestroy", graph.handle)
    world.close()
    report(closed=True)


def capture_on_one_rank():
    world = start("nccl")
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    world.allreduce(x)
    stream.synchronize()
    with Graph(stream) if rank == 0 else contextlib.nullcontext():
        world.allreduce(x)
    attempt(lambda: world.iallreduce(x).wait(host=True) and None)


def lose_a_peer_while_a_graph_exists():
    """Nothing is pending when rank 1 ends, and nothing but graphs would ever find out."""
    world = start("nccl")
    stream = Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    world.allreduce(x)
    stream.synchronize()
    with Graph(stream) as graph:
        world.allreduce(x)
    graph.launch(stream)
    stream.synchronize()
    world.barrier()
    if rank == 1:
        os._exit(9)
    while world._comm.usable:
        time.sleep(0.01)
    attempt(lambda: world.allreduce(x) and None)


def wait_for_an_average_inside_of_a_capture():
    """Rounded there, the result would be in no array before a launch of the graph."""
    world = start("nccl")
    stream = Stream()
    x = ConvertingArray.of(np.full(3, rank + 1.0, "float16"), stream)
    work = world.iallreduce(x, "avg")
    with Graph(stream) as graph:
        attempt(lambda: work.wait() and None)
        attempt(lambda: work.wait(host=True) and None)
        done = work.done()
    report(done=done, recorded=graph.length)
    report(same=work.wait() is x, done=work.done(), result=x.get().tolist())
    world.close()


def capture_the_stream_of_a_leaf():
    """Leaves of one type, of which the second is in the stream that is captured."""
    world = start("nccl")
    streams = [Stream(), Stream()]
    tree = [Array.of(np.full(3, rank + 1.0), stream) for stream in streams]
    for stream in streams:
        stream.synchronize()
    with Graph(streams[1]):
        attempt(lambda: world.allreduce_tree(tree) and None)
    report(result=[x.get().tolist() for x in world.allreduce_tree(tree)])
    world.close()


def capture_a_tree_of_which_nccl_lacks_a_leaf():
    """Averages of integers go through the host."""
    world = start("nccl")
    stream = Stream()
    tree = [Array.of(np.full(3, rank + 1, dtype), stream) for dtype in ("float32", "int64")]
    stream.synchronize()
    with Graph(stream) as graph:
        attempt(lambda: world.allreduce_tree(tree, "avg") and None)
    report(recorded=graph.length, result=[x.get().tolist() for x in world.allreduce_tree(tree)])
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
    with Graph(Stream(), fake_arrays.THREAD_LOCAL):
        attempt(lambda: world.allreduce(x) and None)
    report(result=world.allreduce(x).get().tolist())
    world.close()


def export_inside_of_a_capture():
    """To the captured stream, and to the default stream, which no capture lets anybody use; then to its own stream."""
    stream, own = Stream(), Stream(blocking=False)
    x = DeviceArray(gpus.current_gpu(), "float32", (3,), stream=own.handle)
    with Graph(stream) as graph:
        attempt(lambda: x.__dlpack__(stream=stream.handle) and None)
        attempt(lambda: x.__dlpack__() and None)
        x.__dlpack__(stream=own.handle)
    report(recorded=graph.length)


def wait_after_the_capture():
    """The first operation, which NCCL needs connections for: the call returns once it is part of the graph."""
    world = start("nccl")
    stream = Stream()
    x, y = (Array.of(np.full(3, rank + 1.0), stream) for _ in range(2))
    with Graph(stream) as graph:
        works = [world.iallreduce(x), world.iallreduce(y)]
    for work in works:
        work.wait()
    report(x=x.get().tolist(), y=y.get().tolist())
    graph.launch(stream)
    report(x=x.get().tolist(), y=y.get().tolist())
    world.close()


def wait_in_another_stream_of_the_capture():
    """The operation is in a stream that nothing joins to the capture but the wait."""
    world = start("nccl")
    stream, origin = Stream(), Stream()
    x = Array.of(np.full(3, rank + 1.0), stream)
    stream.synchronize()
    origin.synchronize()
    with Graph(origin) as graph:
        fake_arrays.let_wait(stream, origin)
        work = world.iallreduce(x)
        while not work.done():  # as far as the host knows
            time.sleep(0.001)
        x.stream = origin
        work.wait()
    work.wait()
    report(x=x.get().tolist())
    graph.launch(origin)
    report(x=x.get().tolist())
    fake_arrays.call("GraphExecDestroy", graph.handle)
    world.close()


def capture_the_per_thread_stream():
    world = start("nccl")
    stream = Stream(2)
    x = Array.of(np.full(3, rank + 1.0), stream)
    stream.synchronize()
    with Graph(stream) as graph:
        attempt(lambda: world.allreduce(x) and None)
        attempt(lambda: world.iallreduce(x) and None)
    report(recorded=graph.length, result=world.allreduce(x).get().tolist())
    world.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
