"""The number of a user as a proof: not where it stands for several of them."""

import os
import subprocess
import sys

import pytest
import samestep as ss
from samestep._util import users
from samestep.launch.arguments import Options
from samestep.launch.job_secret import job_secret
from samestep.launch.mpirun import LaunchError
from samestep.rendezvous import FileStore, TCPStore, local_links


@pytest.fixture
def unmapped(monkeypatch):
    """As in a user namespace that maps one user, another than this one."""
    monkeypatch.setattr(users, "_unmapped", os.geteuid)
    monkeypatch.setattr(users, "_read", {"/proc/self/uid_map": "5 1000 1\n"}.get)


def test_the_number_of_all_unmapped_users_proves_nothing(unmapped, tmp_path):
    """Not at any of the places where the kernel's word is taken."""
    for act in (
        lambda: TCPStore("127.0.0.1", 0, is_master=True, timeout=5),
        lambda: FileStore(str(tmp_path / "store")),
        lambda: local_links.connect_all(0, 1, lambda mine: [mine], 5.0),
    ):
        with pytest.raises(
            ss.Error, match="all users that this user namespace does not map; map the job's own"
        ):
            act()
    (tmp_path / "secret").touch(0o600)
    options = Options(1, "x", secret_file=str(tmp_path / "secret"))
    with pytest.raises(LaunchError, match=r"another user .*does not map"):
        job_secret(options, {}, pytest.fail)


def test_a_secret_is_a_proof_there_too(unmapped):
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=30, secret=b"known")
    other = TCPStore("127.0.0.1", master.port, timeout=30, secret=b"known")
    assert other.add("n", 1) == 1
    other.close()
    master.close()


def test_a_namespace_that_maps_all_users_has_no_such_number(monkeypatch):
    monkeypatch.setattr(users, "_unmapped", os.geteuid)
    monkeypatch.setattr(users, "_read", {"/proc/self/uid_map": "0 0 4294967295\n"}.get)
    assert users.is_own(os.geteuid()) and users.text(7) == "uid 7"


def test_in_a_user_namespace_of_the_kernel():
    code = "import os; from samestep._util import users; print(users.is_own(os.geteuid()))"
    found = []
    for flags in ([], ["--user"], ["--user", "--map-root-user"]):
        command = ["unshare", *flags, sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            pytest.skip(f"no user namespace: {done.stderr.strip()[-200:]}")
        found.append(done.stdout.strip())
    assert found == ["True", "False", "True"]
