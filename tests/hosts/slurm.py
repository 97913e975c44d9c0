"""Slurm over the hosts of a lab."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from lab import PATIENCE_S

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
_SETTINGS = """
ClusterName=lab
SlurmctldHost=node0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=node[0-{last}] CPUs=4 RealMemory=100 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Why there can be no Slurm; empty if there can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return (
        f"needs {', '.join(absent)} of the packages slurmd, slurmctld, slurm-client and munge"
        if absent
        else ""
    )


@contextlib.contextmanager
def cluster(lab, n_hosts=2):
    """Slurm on the hosts of a lab, or a test that is skipped."""
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        made = Slurm(lab, n_hosts, Path(folder))
        try:
            yield made
        finally:
            made.close()


class Slurm:
    """Its daemons on all hosts; the files of all lie in `folder`, whose path is short."""

    def __init__(self, lab, n_hosts, folder):
        self._lab = lab
        self._folder = folder
        self._daemons = []
        settings = folder / "slurm.conf"
        settings.write_text(_SETTINGS.format(folder=folder, last=n_hosts - 1))
        self._env = {"SLURM_CONF": str(settings)}
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        try:
            self._begin(n_hosts)
        except BaseException:
            self.close()
            raise

    def _begin(self, n_hosts):
        files = {
            "socket": "munge",
            "key-file": "key",
            "log-file": "munged.log",
            "pid-file": "pid",
            "seed-file": "seed",
        }
        flags = [f"--{flag}={self._folder}/{name}" for flag, name in files.items()]
        self._start("node0", "munged", "--foreground", "--force", *flags)
        self._until((self._folder / "munge").exists)
        self._start("node0", "slurmctld", "-D")
        for i in range(n_hosts):
            self._start(f"node{i}", "slurmd", "-D", "-N", f"node{i}")
        self._until(lambda: self._idle() == n_hosts)

    def _start(self, host, *argv):
        log = (self._folder / f"{argv[0]}-{host}.out").open("w")
        with log:
            self._daemons.append(self._lab.start(host, argv, env=self._env, stdout=log))

    def _until(self, happened):
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            ended = [daemon.args[-1] for daemon in self._daemons if daemon.poll() is not None]
            assert not ended and time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def _idle(self):
        text, _ = self._lab.start(
            "node0", ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=self._env
        ).communicate()
        return int(text) if text.strip().isdigit() else 0

    def logs(self):
        return "\n".join(file.read_text() for file in sorted(self._folder.glob("*.out")))

    def start(self, *argv, **env):
        """A command of Slurm on the first host."""
        return self._lab.start("node0", argv, env=self._env | env)

    def srun(self, *words):
        return self.start("srun", *words)

    def close(self):
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(Exception):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()
