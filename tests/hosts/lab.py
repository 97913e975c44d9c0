"""Hosts on one machine: namespaces with a network and a name of their own, on one switch. Needs root."""

import contextlib
import functools
import json
import os
import subprocess
import sys

PRELUDE = """
import hashlib, json, os, signal, sys, time
import numpy as np
import samestep as ss

def tell(**what):
    print(json.dumps(what), flush=True)

"""
_PROBE = "hostname probe; ip link add name probe type bridge; tc qdisc replace dev probe clsact"
PATIENCE_S = 60.0
FIRST_PORT = 29500  # nobody else is in these networks


@functools.cache
def missing():
    """Why there can be no hosts here; empty if there can."""
    try:
        probe = subprocess.run(
            ["unshare", "--net", "--uts", "sh", "-ec", _PROBE],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except OSError as error:
        return f"needs unshare of util-linux: {error}"
    return f"needs root, iproute2 and bridges: {probe.stderr.strip()}" if probe.returncode else ""


class Lab:
    """Hosts node0 (10.78.0.1, fd78::1), node1 (10.78.0.2, fd78::2), ..."""

    def __init__(self, n_hosts):
        self._holders = {name: _hold(name) for name in ["switch", *(f"node{i}" for i in range(n_hosts))]}
        self.run("switch", "ip link add name bridge type bridge", "ip link set bridge up")
        for i in range(n_hosts):
            ends = f"netns {self._pid('switch')} type veth peer name eth0 netns {self._pid(f'node{i}')}"
            self.run("switch", f"ip link add card{i} {ends}")
            self.run("switch", f"ip link set card{i} master bridge up")
            self.run(
                f"node{i}",
                f"ip addr add 10.78.0.{i + 1}/24 dev eth0",
                f"ip addr add fd78::{i + 1}/64 dev eth0 nodad",
                "ip link set eth0 up",
            )

    def _pid(self, host):
        return self._holders[host].pid

    def _inside(self, host):
        return ["nsenter", f"--target={self._pid(host)}", "--net", "--uts", "--"]

    def run(self, host, *lines):
        for line in lines:
            self.call(host, line.split())

    def call(self, host, argv):
        subprocess.run([*self._inside(host), *argv], check=True, timeout=30)

    def drop(self, number):
        """The host's packets vanish both ways, without a word."""
        self.run("switch", f"bridge link set dev card{number} state disabled")

    def unplug(self, number):
        """The host's card goes down."""
        self.run(f"node{number}", "ip link set eth0 down")

    def lose(self, number, percent):
        """So many of the host's packets vanish, each way: a filter throws the dice, for netem may not be there."""
        dice = f"4,32 0 0 4294963256,53 1 0 {percent * 42949672},6 0 0 2,6 0 0 4294967295"
        self.run("switch", f"tc qdisc replace dev card{number} clsact")
        for way in ("ingress", "egress"):
            words = f"tc filter replace dev card{number} {way} prio 1 handle 1 bpf da bytecode".split()
            self.call("switch", [*words, dice])

    def start(self, host, program, **environment):
        """Starts a program in a host; what it prints is one JSON object a line."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "PRTE"))}
        return subprocess.Popen(
            [*self._inside(host), sys.executable, "-u", str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**clean, **environment},
            text=True,
        )

    def close(self):
        for holder in self._holders.values():
            holder.kill()
            holder.communicate()


def _hold(name):
    script = f"hostname {name}; ip link set lo up; echo ready; exec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-ec", script], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "ready\n"
    return holder


def _of_torchrun(rank, n_ranks):
    return {"RANK": str(rank), "WORLD_SIZE": str(n_ranks)}


def _of_srun(rank, n_ranks):
    return {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(n_ranks)}


class Job:
    """The ranks of a program, spread over hosts as torchrun or srun starts them: `n_each` on each, in order.

    `first`: number of the first host. `late`: ranks that `join` starts.
    """

    def __init__(
        self,
        lab,
        folder,
        script,
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
        self._program = folder / f"program{number}.py"
        self._program.write_text(PRELUDE + script)
        self._names = _of_srun if under_slurm else _of_torchrun
        place = {"MASTER_ADDR": master or f"10.78.0.{first + 1}", "MASTER_PORT": str(FIRST_PORT + number)}
        self._environment = {**place, **environment}
        self.hosts = [f"node{first + i}" for i, n in enumerate(n_each) for _ in range(n)]
        self.processes = {}
        for rank in range(len(self.hosts)):
            if rank not in late:
                self.join(rank)

    def join(self, rank):
        names = self._names(rank, len(self.hosts))
        self.processes[rank] = self._lab.start(self.hosts[rank], self._program, **names, **self._environment)

    def line(self, rank):
        text = self.processes[rank].stdout.readline()
        assert text.startswith("{"), text + self.processes[rank].stdout.read()
        return json.loads(text)

    def lines(self):
        return [self.line(rank) for rank in sorted(self.processes)]

    def wait(self):
        """The exit codes."""
        return [self.processes[rank].wait(PATIENCE_S) for rank in sorted(self.processes)]

    def end(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()
