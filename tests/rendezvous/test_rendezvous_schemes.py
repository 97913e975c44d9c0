"""Ranks meet by the variables of the environment, at a port that the system chooses, and by a scheme of the user."""

import pytest
import samestep as ss
from ranks import FreePort, on_ranks
from samestep.rendezvous import HashStore, open_rendezvous, register_rendezvous_handler


def test_env(monkeypatch):
    with FreePort() as port:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)

        def act(rank):
            met = open_rendezvous(rank=rank, timeout=60)
            try:
                return met.allgather_bytes(b"%d" % rank)
            finally:
                met.close()

        assert on_ranks(2, act) == [[b"0", b"1"]] * 2


def test_port_0_in_a_world_of_one():
    met = open_rendezvous("tcp://127.0.0.1:0", 0, 1, timeout=60)
    assert met.allgather_bytes(b"mine") == [b"mine"]
    met.close()


def test_a_handler_of_ones_own():
    store, seen = HashStore(), []

    def handler(url):
        seen.append(url)
        yield store, int(url[-14]), 2

    register_rendezvous_handler("mine", handler)
    for scheme in ("mine", "tcp", "env", "file", "mpi"):
        with pytest.raises(ss.InvalidArgumentError, match=f"{scheme}:// is taken"):
            register_rendezvous_handler(scheme, handler)
    found = on_ranks(
        2, lambda rank: open_rendezvous("mine://here", rank, 2, timeout=60).allgather_bytes(b"%d" % rank)
    )
    assert found == [[b"0", b"1"]] * 2
    assert sorted(seen) == ["mine://here?rank=0&world_size=2", "mine://here?rank=1&world_size=2"]
