"""How long another host may be silent."""

import socket
import subprocess
import sys

import pytest
import samestep as ss
from running import RUN_COMMAND
from samestep import _settings
from samestep._util import silence


@pytest.mark.parametrize("seconds", ["2", "2.5", "3", "8", "60", "3600"])
def test_an_idle_connection_ends_in_time(seconds, monkeypatch):
    monkeypatch.setenv(_settings.HEARTBEAT, seconds)
    with socket.socket() as link:
        silence.notice_silence(link)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, n = (link.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    assert min(idle, interval, n) >= 1
    assert 0.6 * float(seconds) <= idle + interval * n <= float(seconds)


@pytest.mark.parametrize("text", ["1.9", "3601", "soon", "nan", "-8"])
def test_impossible_times_are_refused(text, monkeypatch):
    monkeypatch.setenv(_settings.HEARTBEAT, text)
    with pytest.raises(ss.InvalidArgumentError, match="SAMESTEP_HEARTBEAT must be"):
        silence.patience()
    monkeypatch.delenv(_settings.HEARTBEAT)
    command = [*RUN_COMMAND, "-n", "1", "--env", f"SAMESTEP_HEARTBEAT={text}", "--no-python", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "SAMESTEP_HEARTBEAT must be" in done.stderr


def test_initialize_refuses_them_too():
    code = "import samestep as ss; ss.initialize()"
    env = {"SAMESTEP_HEARTBEAT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "InvalidArgumentError: SAMESTEP_HEARTBEAT must be" in done.stderr
