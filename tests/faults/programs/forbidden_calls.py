"""Programs of test_forbidden_calls.py: the kernel refuses system calls, or cannot read memory."""

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import signal
import struct
import sys
import time

import numpy as np
import samestep as ss
from native_rank import rank, report, size, start
from samestep import doctor

LIBC = ctypes.CDLL(None, use_errno=True)
ON_X86 = platform.machine() == "x86_64"
NUMBERS = {
    "pidfd_open": 434,
    "memfd_create": 319 if ON_X86 else 279,
    "process_vm_readv": 310 if ON_X86 else 270,
    "process_vm_writev": 311 if ON_X86 else 271,
}
MEMFD_SECRET = 447
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38  # see prctl(2)
BPF_LOAD, BPF_JUMP_IF_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06  # see seccomp(2)
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid(*calls, error=errno.EPERM):
    """From now on the kernel answers `error` to them in this process."""
    lines = [(BPF_LOAD, 0, 0, 0)]  # the number of the call
    for call in calls:
        lines += [(BPF_JUMP_IF_EQUAL, 0, 1, NUMBERS[call]), (BPF_RETURN, 0, 0, SECCOMP_RET_ERRNO | error)]
    lines.append((BPF_RETURN, 0, 0, SECCOMP_RET_ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = FilterProgram(len(lines), ctypes.addressof(code))
    assert LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program)) == 0, ctypes.get_errno()


def give_up_privileges():
    """Root may read the memory of any process."""
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    assert LIBC.capset(header, none) == 0


def secret_array(value, n):
    fd = LIBC.syscall(MEMFD_SECRET, 0)
    if fd < 0:
        report(skip="no memfd_secret")
        os._exit(0)
    os.ftruncate(fd, 8 * n)
    x = np.frombuffer(mmap.mmap(fd, 8 * n), "f8")
    os.close(fd)
    x[...] = value
    return x


def close_memory_after_the_start(change):
    """`change`, on rank 1: "calls", "dumpable" or "secret"."""
    world = start(timeout=20.0)
    n = 60_000
    world.allreduce(np.ones(n))
    give_up_privileges()
    if rank == 1 and change == "calls":
        forbid("process_vm_readv", "process_vm_writev")
    elif rank == 1 and change == "dumpable":
        assert LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0

    def array(value):
        secret = rank == 1 and change == "secret"
        return secret_array(value, n) if secret else np.full(n, float(value))

    total = sum(range(1, size + 1))
    for turn in range(8):  # all paths are tried
        assert np.all(world.allreduce(array(rank + 1)) == total), "allreduce"
        assert np.all(world.bcast(array(rank + 1), root=turn % size) == turn % size + 1), "bcast"
        gathered = world.allgather(array(rank + 1))
        assert [row[-1] for row in gathered] == list(range(1, size + 1)), "allgather"
        into = array(0)
        world.sendrecv(array(rank + 1), (rank + 1) % size, into, (rank - 1) % size)
        assert np.all(into == (rank - 1) % size + 1), "sendrecv"
        if rank == 0:
            world.send(array(5), 1)
        if rank == 1:
            world.recv(into, 0)
            assert np.all(into == 5), "recv"
        world.barrier()
    report(right=True)
    ss.finalize()


def lose_rank_1_without_pidfd():
    forbid("pidfd_open", error=errno.ENOSYS if rank == 2 else errno.EPERM)  # as old kernels, or filters
    world = start()
    world.barrier()
    report(pid=os.getpid())
    if rank == 1:
        os.fork()  # the child keeps the sockets of its parent open
        signal.pause()
    try:
        world.barrier()
    except ss.PeerLostError as error:
        report(text=str(error), at=time.time())


def share_no_memory(how, later):
    """On rank 0, which makes the memory of a group; `later`: only that of a group after the world."""

    def refuse():
        if rank == 0 and how == "forbidden":
            forbid("memfd_create")
        elif rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    if not later:
        refuse()
    try:
        world = start(timeout=120.0)
        refuse()
        world.split(0)
    except ss.UnavailableError as error:
        report(text=str(error))
        if later:
            world.barrier()  # the world is as it was


def close_standard_descriptors():
    kept = os.dup(1)
    for fd in range(3):
        os.close(fd)
    world = start()
    world.barrier()
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
    os.write(kept, json.dumps({"files": files}).encode() + b"\n")
    world.barrier()


def tell_what_is_forbidden():
    """By `samestep doctor`, once as it is and once with a filter."""
    found = [doctor.examine()]
    forbid("process_vm_readv", error=errno.ENOSYS)
    forbid("pidfd_open")
    found.append(doctor.examine())
    report(notes=[[text for name, text, _ in doctor.rows(each) if name == "one host"] for each in found])


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
