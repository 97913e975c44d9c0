"""What ranks have to be given alike."""

import re

import pytest
import samestep as ss
from samestep import levels, terms

ALL = sorted({*terms.OVER["mpi"], *terms.OVER["native"], *terms.OF_DEVICES})
OTHER = {name: "direct" if name == terms.ALGORITHM else "4096" for name in ALL} | {
    terms.ENGINES["mpi"]: "hier",
    terms.ENGINES["native"]: "hier",
    terms.GPU_AWARE: "auto",
    "SAMESTEP_NCCL_CHECK": "before",
}


@pytest.mark.parametrize("name", ALL)
def test_what_one_rank_was_given_otherwise_is_told_with_ranks_and_values(name):
    table = [{}, {}, {name: OTHER[name]}, {}]
    usual = re.escape(terms.meaning(name, None) or "not set")
    told = rf"{name} has .*, but is {usual} on ranks 0-1, 3, {OTHER[name]} on rank 2"
    with pytest.raises(ss.MismatchError, match=told):
        terms.agreed(table, [name])
    assert terms.agreed(table, [other for other in ALL if other != name])  # which does not matter here
    assert terms.agreed([{name: OTHER[name]}] * 4, [name]) == {name: OTHER[name]}


@pytest.mark.parametrize("name", ALL)
def test_what_means_nothing_is_told_with_its_rank(name):
    with pytest.raises(ss.InvalidArgumentError, match=f"{name} must be .*, got '-1' on rank 1"):
        terms.agreed([{}, {name: "-1"}], [name])


@pytest.mark.parametrize("name", [name for name in ALL if terms.meaning(name, None)])
def test_what_says_the_usual_is_as_good_as_nothing(name):
    usual = terms.meaning(name, None)
    assert terms.agreed([{}, {name: usual}], [name]) == {name: usual}


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith("_PIECE")])
def test_a_piece_of_no_bytes_is_none(name):
    assert terms.agreed([{}, {name: "0"}], [name]) == {name: ""}


def test_asking_for_mpi_with_device_memory_puts_all_ranks_on_mpi():
    given = {terms.GPU_AWARE: "1"}
    assert levels.engine_of("mpi", terms.agreed([given] * 2, terms.OVER["mpi"])) == "direct"
    assert levels.engine_of("native", terms.agreed([given] * 2, terms.OVER["native"])) == "auto"
    given[terms.ENGINES["mpi"]] = "node"
    with pytest.raises(ss.InvalidArgumentError, match="SAMESTEP_MPI_ENGINE=node"):
        levels.engine_of("mpi", terms.agreed([given] * 2, terms.OVER["mpi"]))
