"""Hosts on one machine: namespaces with a network and a name of their own, on one switch. Needs root.

They know each other's names and reach each other by `ssh`, which is `programs/ssh.py`. Files are shared.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_PROBE = "hostname probe; ip link add name probe type bridge; tc qdisc replace dev probe clsact"
PATIENCE_S = 120.0  # of a machine on which many ranks, and other work, share few processors
FOUND_WITHIN_S = 10.0 + 20.0  # of a failure: what is promised, and what such a machine takes
LIMITER_BURST = 256 << 10  # bytes that a limited card lets through at once
FIRST_PORT = 29500  # nobody else is in these networks


@functools.cache
def missing():
    """Why there can be no hosts here; empty if there can."""
    try:
        probe = subprocess.run(
            ["setpriv", "unshare", "--net", "--uts", "--mount", "sh", "-ec", _PROBE],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except OSError as error:
        return f"needs unshare of util-linux: {error}"
    return f"needs root, iproute2 and bridges: {probe.stderr.strip()}" if probe.returncode else ""


def plain_environment():
    """Of this process, without what a launcher of its own says about its rank."""
    of_launchers = ("OMPI_", "PMI", "PRTE", "SLURM_")
    return {k: v for k, v in os.environ.items() if not k.startswith(of_launchers)}


class Lab:
    """Hosts node0 (10.78.0.1, fd78::1), node1 (10.78.0.2, fd78::2), ..."""

    def __init__(self, n_hosts):
        self._folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))  # short, for a socket
        names = [f"node{i}" for i in range(n_hosts)]
        lines = [
            "127.0.0.1 localhost",
            *(f"10.78.0.{i + 1} {name} train-{i}.ring" for i, name in enumerate(names)),
        ]
        (self._folder / "hosts").write_text("".join(line + "\n" for line in lines))
        self._holders = {name: self._hold(name) for name in ["switch", *names]}
        self.run("switch", "ip link add name bridge type bridge", "ip link set bridge up")
        for i, name in enumerate(names):
            ends = f"netns {self._pid('switch')} type veth peer name eth0 netns {self._pid(name)}"
            self.run("switch", f"ip link add card{i} {ends}", f"ip link set card{i} master bridge up")
            self.run(
                name,
                f"ip addr add 10.78.0.{i + 1}/24 dev eth0",
                f"ip addr add fd78::{i + 1}/64 dev eth0 nodad",
                "ip link set eth0 up",
            )
        self._serve_ssh()

    def _hold(self, name):
        script = (
            f"hostname {name}; mount --bind {self._folder}/hosts /etc/hosts; ip link set lo up; echo ready; "
            "exec sleep infinity"
        )
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--mount", "sh", "-ec", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout.readline() == "ready\n"
        return holder

    def _pid(self, host):
        return self._holders[host].pid

    def _inside(self, host):
        return ["nsenter", f"--target={self._pid(host)}", "--net", "--uts", "--mount", "--"]

    def run(self, host, *lines):
        for line in lines:
            self.call(host, line.split())

    def call(self, host, argv):
        subprocess.run([*self._inside(host), *argv], check=True, timeout=30)

    # --- what happens to networks

    def drop(self, number):
        """The host's packets vanish in both directions, without a word."""
        self.run("switch", f"bridge link set dev card{number} state disabled")

    def restore(self, number):
        """The end of `drop`."""
        self.run("switch", f"bridge link set dev card{number} state forwarding")

    def cut(self, one, two):
        """Packets between two hosts vanish; both reach the others."""
        for here, other in ((one, two), (two, one)):
            source = 0x0A4E0001 + other  # 10.78.0.1 is node0
            self.run("switch", f"tc qdisc replace dev card{here} clsact")
            words = f"tc filter add dev card{here} egress prio 1 handle 1 bpf da bytecode".split()
            self.call("switch", [*words, f"4,32 0 0 26,21 0 1 {source},6 0 0 2,6 0 0 4294967295"])

    def mend(self, one, two):
        """The end of `cut`."""
        self.run("switch", *(f"tc qdisc del dev card{number} clsact" for number in (one, two)))

    def unplug(self, number):
        """Shuts down the host's card."""
        self.run(f"node{number}", "ip link set eth0 down")

    def power_off(self, number):
        """The host vanishes with all that runs there; a process that reached it by ssh is not notified."""
        self.drop(number)
        self._off.add(f"node{number}")
        self._kill_inside([f"node{number}"])

    def lose(self, number, percent):
        """So many of the host's packets vanish in each direction. A filter drops them, as netem may be missing."""
        dice = f"4,32 0 0 4294963256,53 1 0 {percent * 42949672},6 0 0 2,6 0 0 4294967295"
        self.run("switch", f"tc qdisc replace dev card{number} clsact")
        for direction in ("ingress", "egress"):
            words = f"tc filter replace dev card{number} {direction} prio 1 handle 1 bpf da bytecode".split()
            self.call("switch", [*words, dice])

    def limit(self, number, rate):
        """The host's card sends and receives no faster than `rate`, as in "1gbit"."""
        words = f"root tbf rate {rate} burst {LIMITER_BURST}b limit 4mb"
        self.run("switch", f"tc qdisc replace dev card{number} {words}")
        self.run(f"node{number}", f"tc qdisc replace dev eth0 {words}")

    # --- programs

    def start(self, host, argv, **options):
        """Starts a program in a host, where `ssh` leads to the others; what it prints can be read."""
        environment = options.pop("env", {})
        path = f"{self._folder}:{os.environ['PATH']}"
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(options.pop("cwd", "/"))]
        environment = {**plain_environment(), "PATH": path, **environment}
        return subprocess.Popen([*self._inside(host), *there, *argv], env=environment, **options)

    def _serve_ssh(self):
        path = str(self._folder / "socket")
        ssh = self._folder / "ssh"
        program = Path(__file__).parent / "programs" / "ssh.py"
        ssh.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {program} {path} "$@"\n')
        ssh.chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._commands = []
        self._off, self._closed = set(), threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link):
        with link, contextlib.suppress(OSError):
            _, fds, _, _ = socket.recv_fds(link, 1, 3)
            host, command = link.makefile().readline().rstrip("\n").split("\0")
            environment = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
            environment["PATH"] = f"{self._folder}:/usr/local/bin:/usr/bin:/bin"
            process = subprocess.Popen(
                [*self._inside(host), "sh", "-c", command],
                stdin=fds[0],
                stdout=fds[1],
                stderr=fds[2],
                env=environment,
                cwd="/",
                start_new_session=True,  # as below a daemon: it survives the caller
            )
            self._commands.append(process)
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(process.pid)
            select.select([pidfd], [], [])
            os.close(pidfd)
            code = process.wait()
            if host in self._off:
                self._closed.wait()
            link.sendall(b"%d\n" % code)

    def left(self):
        """Commands that came by ssh and still run."""
        return [process.args[-1] for process in self._commands if process.poll() is None]

    def _kill_inside(self, hosts):
        """Ends what runs in the hosts' networks: what a launcher that was killed leaves behind, too."""
        holders = [self._pid(host) for host in hosts]
        networks = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in holders}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                if int(name) not in holders and os.stat(f"/proc/{name}/ns/net").st_ino in networks:
                    os.kill(int(name), signal.SIGKILL)

    def close(self):
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._kill_inside(self._holders)
        for holder in self._holders.values():
            holder.kill()
            holder.communicate()
        shutil.rmtree(self._folder)


def _of_torchrun(rank, n_ranks):
    return {"RANK": str(rank), "WORLD_SIZE": str(n_ranks)}


def _of_srun(rank, n_ranks):
    return {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(n_ranks)}


class LabJob:
    """The ranks of `python *program`, spread over hosts as by torchrun or srun: `n_each` on each, in order.

    Each line they print is one JSON object. `first`: number of the first host. `late`: ranks that `join` starts.
    """

    def __init__(
        self,
        lab,
        program,
        n_each,
        *,
        number=0,
        first=0,
        master="",
        late=(),
        under_slurm=False,
        **environment,
    ):
        self._lab = lab
        self._program = program
        self._names = _of_srun if under_slurm else _of_torchrun
        place = {"MASTER_ADDR": master or f"10.78.0.{first + 1}", "MASTER_PORT": str(FIRST_PORT + number)}
        self._environment = {"SAMESTEP_SECRET": "of this laboratory", **place, **environment}
        self.hosts = [f"node{first + i}" for i, n in enumerate(n_each) for _ in range(n)]
        self.processes = {}
        for rank in range(len(self.hosts)):
            if rank not in late:
                self.join(rank)

    def join(self, rank):
        names = self._names(rank, len(self.hosts))
        argv = [sys.executable, "-u", *self._program]
        self.processes[rank] = self._lab.start(self.hosts[rank], argv, env={**names, **self._environment})

    def report(self, rank):
        text = self.processes[rank].stdout.readline()
        assert text.startswith("{"), text + self.processes[rank].stdout.read()
        return json.loads(text)

    def lines(self):
        return [self.report(rank) for rank in sorted(self.processes)]

    def wait(self):
        """The exit codes."""
        return [self.processes[rank].wait(PATIENCE_S) for rank in sorted(self.processes)]

    def end(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()
