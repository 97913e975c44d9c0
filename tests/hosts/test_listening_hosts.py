"""Who stands between hosts, or at an address that both have, learns no secret and runs nothing."""

import os
import subprocess
import sys
from pathlib import Path

from lab import PATIENCE_S
from running import RUN_COMMAND, program

PROGRAMS = Path(__file__).parent / "programs"
JOB = program("hosts/start_hosts", "reduce_once", "native", "said by a rank")
SECRET = "known to the ranks alone"


def run(lab, *flags, **environment):
    """What a job on node0 and node1 prints."""
    command = [*RUN_COMMAND, "--raw", "--hosts=node0:1,node1:1", *flags, *JOB]
    process = lab.start("node0", command, env={"SAMESTEP_SECRET": SECRET, **environment})
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, text
    return text


def test_no_secret_is_seen_on_the_wire(lab):
    """What ranks print is seen; the secret is not, nor what the user gives to the ranks, or they tell each other."""
    listener = lab.start(
        "switch", [sys.executable, str(PROGRAMS / "listener.py"), "card1"], stdin=subprocess.PIPE
    )
    assert listener.stdout.readline() == "ready\n"
    run(lab, "--env=TOKEN=of another service")
    heard = bytes.fromhex(listener.communicate(timeout=PATIENCE_S)[0])
    assert b"said by a rank" in heard
    assert b"samestep store" in heard and b"samestep agent" in heard
    for words in (SECRET, "of another service", "SAMESTEP_SECRET", "world_size"):
        assert words.encode() not in heard, words


def test_a_listener_at_an_address_of_both_hosts_runs_nothing(lab, tmp_path):
    """The launcher's first address is one that the second host has as well; another user listens there."""
    own_bridge = (
        "ip link add docker0 type bridge",
        "ip addr add 172.17.0.1/16 dev docker0",
        "ip link set docker0 up",
    )
    lab.run("node1", *own_bridge)
    lab.run(
        "node0",
        *own_bridge,
        "ip addr del 10.78.0.1/24 dev eth0",
        "ip link add br0 type bridge",  # after docker0, so that its address is tried later
        "ip link set eth0 master br0",
        "ip addr add 10.78.0.1/24 dev br0",
        "ip link set br0 up",
    )
    for name in ("port", "ready"):
        os.mkfifo(tmp_path / name)
    bridge = [sys.executable, str(PROGRAMS / "bridge.py")]
    attack = [*bridge, "listen", str(tmp_path), "172.17.0.1", "10.78.0.1", str(tmp_path / "stolen")]
    attacker = lab.start("node1", attack, stdin=subprocess.PIPE)
    text = run(lab, "--rsh=" + " ".join([*bridge, "tell", str(tmp_path), "ssh"]))
    assert text.count('"total": 3.0') == 2
    assert attacker.communicate(timeout=PATIENCE_S)[0] == "not asked\n"
    assert not (tmp_path / "stolen").exists()
