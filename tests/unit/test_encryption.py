"""Where `SAMESTEP_ENCRYPT=1` is refused."""

from types import SimpleNamespace

import pytest
import samestep as ss
from samestep.world import native_world, transports

WANTED = [{"SAMESTEP_ENCRYPT": "1"}] * 2


def test_keys_need_a_secret_that_only_the_job_knows(monkeypatch):
    monkeypatch.delenv("SAMESTEP_SECRET", raising=False)
    told = native_world.hindrance_of_encryption(SimpleNamespace(rank=3, private=False))
    assert "rank 3 has no secret" in told
    assert "set SAMESTEP_SECRET" in told
    assert native_world.hindrance_of_encryption(SimpleNamespace(rank=3, private=True)) == ""
    monkeypatch.setenv("SAMESTEP_SECRET", "a secret")
    assert native_world.hindrance_of_encryption(SimpleNamespace(rank=3, private=False)) == ""


@pytest.mark.parametrize("backends", [["mpi", "mpi"], ["nccl", "mpi"], ["nccl", "native"]])
def test_mpi_and_nccl_are_refused_between_hosts(backends):
    with pytest.raises(ss.UnavailableError, match=f"does not encrypt what {backends[0].upper()} sends"):
        transports.refuse_unencrypted(backends, WANTED, ["a", "b"])
    transports.refuse_unencrypted(backends, WANTED, ["a", "a"])
    transports.refuse_unencrypted(backends, [{}, {"SAMESTEP_ENCRYPT": "0"}], ["a", "b"])


def test_native_ranks_may_encrypt_between_hosts():
    transports.refuse_unencrypted(["native", "native"], WANTED, ["a", "b"])


def test_all_ranks_encrypt_or_none():
    with pytest.raises(ss.MismatchError, match="SAMESTEP_ENCRYPT has to be the same on all ranks"):
        transports.refuse_unencrypted(["native", "native"], [{}, *WANTED], ["a", "b", "b"])
