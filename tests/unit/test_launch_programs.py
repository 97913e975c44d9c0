"""What the launcher starts itself, and the port that it keeps for the ranks."""

import json
import socket
import sys

import pytest
from samestep.launch import arguments, network, run
from samestep.launch.find_launcher import BOOTSTRAP, rank_and_size
from samestep.launch.programs import programs


def test_one_agent_per_rank_without_mpi(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")
    monkeypatch.setenv("SLURM_PROCID", "7")
    found = programs(arguments.parse(["--native", "-n", "2", "x"]), {"port": 1})
    assert [(p.name, p.ranks) for p in found] == [("agent of rank 0", (0,)), ("agent of rank 1", (1,))]
    for rank, program in enumerate(found):
        assert not {"OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & set(program.env)
        bootstrap = json.loads(program.env[BOOTSTRAP])
        assert bootstrap == {"port": 1, "ranks": [rank], "size": 2}
        assert rank_and_size({**bootstrap, "rank": rank}) == {"rank": rank, "size": 2}


def test_the_way_to_start(capsys):
    assert not arguments.parse(["-n", "1", "x"]).mpi
    assert arguments.parse(["--mpi", "-n", "1", "x"]).mpi
    assert not arguments.parse(["--native", "-n", "1", "x"]).mpi
    with pytest.raises(SystemExit):
        arguments.parse(["--native", "--mpi", "-n", "1", "x"])
    assert "--mpi and --native exclude each other" in capsys.readouterr().err


def test_one_remote_shell_for_the_ranks_of_another_host(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/a b")
    options = arguments.parse(["--hosts", "localhost:1,far:2", "--rsh", "my 'r s h' -q", "x"])
    here, there = programs(options, {"token": "secret"})
    assert (here.ranks, here.stdin) == ((0,), None)
    assert (there.name, there.ranks) == ("my to far", (1, 2))
    *prefix, command = there.argv
    assert prefix == ["my", "r s h", "-q", "far"]
    assert command.startswith(f"exec env 'LD_LIBRARY_PATH=/a b' SAMESTEP_LAUNCH=- {sys.executable} -I -S /")
    assert "secret" not in command  # everybody can read it
    assert json.loads(there.stdin) == {"token": "secret", "ranks": [1, 2], "size": 3}


def test_a_remote_shell_that_is_not_there_is_told_before_the_start():
    far = ["--hosts", "localhost:1,far-away:1"]
    refused = run._why_not(arguments.parse([*far, "--rsh", "rsh-of-nobody", "/bin/sh"]))
    assert refused.startswith("there is no rsh-of-nobody in PATH")
    assert not run._why_not(arguments.parse([*far, "--rsh", "sh", "/bin/sh"]))
    assert not run._why_not(arguments.parse(["--native", "--hosts", "localhost:2", "/bin/sh"]))


def test_a_reserved_port_is_for_servers_that_reuse_addresses_only():
    with network.reserve_port() as holder:
        port = holder.getsockname()[1]
        server, other = socket.create_server(("127.0.0.1", port)), socket.socket()
        with server, other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))


def test_reserved_ports_differ():
    holders = [network.reserve_port() for _ in range(50)]
    assert len({holder.getsockname()[1] for holder in holders}) == 50
    for holder in holders:
        holder.close()


def test_without_ports_of_servers_any_is_taken(monkeypatch):
    monkeypatch.setattr(network, "_ports_of_servers", lambda: [22] * network._PORTS_TO_TRY)
    blocked = []
    bind = socket.socket.bind

    def refusing(self, address):
        if address[1] == 22:
            blocked.append(address)
            raise OSError(98, "Address already in use")
        bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", refusing)
    with network.reserve_port() as holder:
        assert holder.getsockname()[1] > 0
    assert len(blocked) == network._PORTS_TO_TRY
