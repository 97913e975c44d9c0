"""What would be many jobs of one rank by mistake, and arguments of initialize that cannot be."""

import pytest
import samestep as ss

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    ss.finalize()  # what an example of the docs may have left
    yield
    ss.finalize()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "one"}, "WORLD_SIZE is 2, but RANK is 'one'"),
        ({"RANK": "1"}, "RANK is 1, but WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "RANK is 0, but WORLD_SIZE is 'two'"),
    ],
)
def test_half_of_the_variables(variables, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ss.InvalidArgumentError, match=message):
        ss.initialize("native")


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"RANK": "0"}])
def test_alone(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ss.initialize("native").size == 1


def test_rank_and_size_as_they_stand_in_variables():
    assert ss.initialize("native", rank="0", world_size="1").rank == 0


@pytest.mark.parametrize("given", ["one", -1, 0.0])
def test_a_rank_that_is_no_number(given):
    with pytest.raises(ss.InvalidArgumentError, match="rank must be a whole number of at least 0, got "):
        ss.initialize("native", rank=given, world_size=1)


@pytest.mark.parametrize("given", [0, "0", ["a"], [0.5]])
def test_devices_that_are_no_list_of_ints(given):
    with pytest.raises(ss.InvalidArgumentError, match=r"devices must be None, .* or a list of ints"):
        ss.initialize("native", cuda_devices=given)
