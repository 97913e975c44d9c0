"""The store of JAX's processes: found, and opened, by what JAX's own store says. JAX is played here."""

import json
import logging

import pytest
import samestep as ss
from samestep.jax import meeting
from samestep.rendezvous import TCPStore, same_user

COORDINATOR = "127.0.0.1:1234"


class Jax:
    """Its client, of which several processes see the same keys."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        return self.values[key]


def opened(jax, process):
    return meeting._open_store(jax, process, COORDINATOR, 10.0)


@pytest.fixture(params=[None, "of the user"])
def secret(request, monkeypatch):
    if request.param is None:
        monkeypatch.delenv("SAMESTEP_SECRET", raising=False)
    else:
        monkeypatch.setenv("SAMESTEP_SECRET", request.param)
    return request.param


def test_the_processes_agree_on_a_secret_and_strangers_do_not_know_it(secret, monkeypatch):
    monkeypatch.setattr(same_user, "is_loopback", lambda host: False)  # as over a network
    jax = Jax()
    master, place, known = opened(jax, 0)
    assert opened(jax, 1) == (None, place, known)
    assert len(known) >= 11 and master.private
    other = TCPStore(*place, timeout=10, secret=known)
    assert other.add("n", 1) == 1
    for guess in (b"", b"guess"):
        with pytest.raises(ss.UnavailableError, match="SAMESTEP_SECRET differs"):
            TCPStore(*place, timeout=10, secret=guess)
    other.close()
    master.close()
    assert secret is None or secret not in json.dumps(jax.values)  # strangers may read JAX's store
    again, _, another = opened(Jax(), 0)
    assert (another == known) == (secret is not None)
    again.close()


@pytest.mark.parametrize("trust", [None, "1"])
def test_a_key_that_strangers_can_read_is_warned_of(secret, trust, monkeypatch, caplog):
    monkeypatch.setattr(same_user, "is_loopback", lambda host: False)
    if trust:
        monkeypatch.setenv("SAMESTEP_TRUST_NETWORK", trust)
    with caplog.at_level(logging.WARNING, "samestep"):
        opened(Jax(), 0)[0].close()
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (secret is None and trust is None)
    assert all(COORDINATOR in text and "SAMESTEP_SECRET" in text for text in warned)


def test_one_host_needs_no_warning(secret, caplog):
    with caplog.at_level(logging.WARNING, "samestep"):
        opened(Jax(), 0)[0].close()
    assert not caplog.records
