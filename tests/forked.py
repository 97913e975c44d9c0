"""Python processes that begin with NumPy and samestep imported: a server that has them forks each in milliseconds.

For programs of several ranks, of which tests start many, and most of whose time is that of imports.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
_PATH = [str(HERE), str(HERE / "fakes")]  # of the server alone
_WAIT_FOR_SERVER_S = 120.0
_LONGEST = 1 << 17  # bytes of a message: variables and arguments
_SERVE = "import sys, forked; exec(forked.serve(int(sys.argv[1])))"


class Process:
    """What `start` began. `returncode` is None until `wait` has seen the end, and negative after a signal."""

    def __init__(self, pid):
        self.pid, self.returncode = pid, None

    def wait(self, seconds):
        """The exit code. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while self.returncode is None:
            _server().receive(deadline)
        return self.returncode

    def poll(self):
        with contextlib.suppress(TimeoutError):
            self.wait(0)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """Returns once it has ended."""
        self.send_signal(signal.SIGKILL)
        self.wait(_WAIT_FOR_SERVER_S)


def start(argv, env, output, *, errors=None, stdin=None, folder="."):
    """Run `python -u -X faulthandler *argv` in a session of its own.

    `argv` begins with a file, or with "-m" and a module. `output`, `errors` and `stdin` are descriptors: `errors` go to
    `output` by default, and standard input is empty.
    """
    argv = [os.fspath(word) for word in argv]
    with open(os.devnull) as nothing:
        fds = [
            nothing.fileno() if stdin is None else stdin,
            output,
            output if errors is None else errors,
        ]
        return _server().start([argv, dict(env), os.path.abspath(folder)], fds)


class _Server:
    def __init__(self):
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.getpid()
        self._running = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-c", _SERVE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(_PATH),
                    "OPENBLAS_NUM_THREADS": "1",
                },  # it forks with one thread
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.end)

    def start(self, request, fds):
        text = json.dumps(request).encode()
        assert len(text) < _LONGEST
        socket.send_fds(self._ours, [text], fds)
        began = None
        while began is None:
            began = self.receive(time.monotonic() + _WAIT_FOR_SERVER_S)
        return began

    def receive(self, deadline):
        """One message of the server. Returns the process that began, if one did."""
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError("the process has not ended")
        text = self._ours.recv(_LONGEST)
        assert text, "the server of processes has died"
        pid, code = json.loads(text)
        if code is None:
            self._running[pid] = Process(pid)
            return self._running[pid]
        self._running.pop(pid).returncode = code
        return None

    def end(self):
        if os.getpid() == self._pid:
            self._ours.close()
            self._process.wait()


_server = functools.cache(_Server)


def serve(number):
    """Fork processes, as a client asks, until it has gone. Returns in each of them: the code to run."""
    import fake_arrays  # noqa: F401 - here and not in each process
    import numpy as np  # noqa: F401
    import samestep.launch.run
    import samestep.world.native_world  # noqa: F401

    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    client, running = socket.socket(fileno=number), set()
    while True:
        ready, _, _ = select.select([client, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_who_ended(client, running)
        if client not in ready:
            continue
        text, fds, _, _ = socket.recv_fds(client, _LONGEST, 3)
        if not text:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        pid = os.fork()
        if pid == 0:
            client.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(woken)
            os.close(wakes)
            return _become(*json.loads(text), fds)
        for fd in fds:
            os.close(fd)
        running.add(pid)
        client.send(json.dumps([pid, None]).encode())


def _tell_who_ended(client, running):
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        running.remove(pid)
        client.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _become(argv, env, folder, fds):
    os.setsid()  # so that its children can be ended with it
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a shell does in the foreground
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    more = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*more, *(p for p in sys.path if p not in ("", *_PATH, *more))]
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path.insert(0, folder)
        return "import runpy, sys; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    sys.argv[:] = argv
    sys.path.insert(0, os.path.dirname(argv[0]))
    sys.modules["__main__"].__file__ = argv[0]
    return compile(Path(argv[0]).read_bytes(), argv[0], "exec")
