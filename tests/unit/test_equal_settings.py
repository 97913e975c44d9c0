"""Settings that must agree on all ranks."""

import re

import pytest
import samestep as ss
from samestep import _settings
from samestep.world import transports

ALL = sorted(
    {*_settings.must_agree("mpi"), *_settings.must_agree("native"), *_settings.must_agree("devices")}
)
OTHER = {name: "two_shot" if name == _settings.ALGORITHM else "4096" for name in ALL} | {
    _settings.TRANSPORTS["mpi"]: "hierarchical",
    _settings.TRANSPORTS["native"]: "hierarchical",
    _settings.GPU_AWARE_MPI: "auto",
    _settings.ENCRYPT: "1",
}


@pytest.mark.parametrize("name", ALL)
def test_what_one_rank_was_given_otherwise_is_told_with_ranks_and_values(name):
    table = [{}, {}, {name: OTHER[name]}, {}]
    usual = re.escape(_settings.parse(name, None) or "not set")
    message = rf"{name} has .*, but is {usual} on ranks 0-1, 3, {OTHER[name]} on rank 2"
    with pytest.raises(ss.MismatchError, match=message):
        transports.require_equal(table, [name])
    assert transports.require_equal(
        table, [other for other in ALL if other != name]
    )  # which does not matter here
    assert transports.require_equal([{name: OTHER[name]}] * 4, [name]) == {name: OTHER[name]}


def test_versions_are_compared(monkeypatch):
    ours = transports.local_settings({})
    assert transports.require_equal([ours] * 3, ()) == {}
    monkeypatch.setattr(_settings, "VERSION", "9.9")
    theirs = transports.local_settings({})
    message = (
        rf"same version of samestep, but have {re.escape(ours['version'])} on ranks 0, 2, 9\.9 on rank 1"
    )
    with pytest.raises(ss.MismatchError, match=message):
        transports.require_equal([ours, theirs, ours], ())


@pytest.mark.parametrize("name", ALL)
def test_what_means_nothing_is_told_with_its_rank(name):
    with pytest.raises(ss.InvalidArgumentError, match=f"{name} must be .*, got '-1' on rank 1"):
        transports.require_equal([{}, {name: "-1"}], [name])


@pytest.mark.parametrize("name", [name for name in ALL if _settings.parse(name, None)])
def test_what_says_the_usual_is_as_good_as_nothing(name):
    usual = _settings.parse(name, None)
    assert transports.require_equal([{}, {name: usual}], [name]) == {name: usual}


@pytest.mark.parametrize("name", [name for name in ALL if _settings.SETTINGS[name].zero_is_unset])
def test_a_piece_of_no_bytes_is_none(name):
    assert transports.require_equal([{}, {name: "0"}], [name]) == {name: ""}


def requested(backend, given):
    agreed = transports.require_equal([given] * 2, _settings.must_agree(backend))
    return transports.requested_transport(backend, agreed)


def test_asking_for_mpi_with_device_memory_puts_all_ranks_on_mpi():
    given = {_settings.GPU_AWARE_MPI: "1"}
    assert requested("mpi", given) == "mpi"
    assert requested("native", given) == "auto"
    given[_settings.TRANSPORTS["mpi"]] = "shm"
    with pytest.raises(ss.InvalidArgumentError, match="SAMESTEP_MPI_TRANSPORT=shm"):
        requested("mpi", given)
