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
FIRST_PORT = 29500  # nobody else is in these networks


@functools.cache
def missing():
    """Why there can be no hosts here; empty if there can."""
    try:
        probe = subprocess.run(
            ["unshare", "--net", "--uts", "sh", "-ec", "hostname probe; ip link add name probe type bridge"],
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
            subprocess.run([*self._inside(host), *line.split()], check=True, timeout=30)

    def drop(self, number):
        """The host's packets vanish both ways, without a word."""
        self.run("switch", f"bridge link set dev card{number} state disabled")

    def unplug(self, number):
        """The host's card goes down."""
        self.run(f"node{number}", "ip link set eth0 down")

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
    """The ranks of a program, spread over hosts as torchrun or srun starts them: `n_each` on each, in order."""

    def __init__(
        self, lab, folder, script, n_each, *, number=0, master="10.78.0.1", under_slurm=False, **environment
    ):
        program = folder / f"program{number}.py"
        program.write_text(PRELUDE + script)
        n_ranks = sum(n_each)
        names = _of_srun if under_slurm else _of_torchrun
        self.hosts = [f"node{i}" for i, n in enumerate(n_each) for _ in range(n)]
        self.processes = [
            lab.start(
                host,
                program,
                MASTER_ADDR=master,
                MASTER_PORT=str(FIRST_PORT + number),
                **names(rank, n_ranks),
                **environment,
            )
            for rank, host in enumerate(self.hosts)
        ]

    def line(self, rank):
        text = self.processes[rank].stdout.readline()
        assert text.startswith("{"), text + self.processes[rank].stdout.read()
        return json.loads(text)

    def lines(self):
        return [self.line(rank) for rank in range(len(self.processes))]

    def end(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()
