"""Which tests of the pytest plugin share interpreters, and what they cannot do to each other."""

import re
from textwrap import dedent

import pytest
from plugin_runs import run_all

GOOD = """
    import os, sys
    import pytest

    @pytest.mark.ranks(1)
    def test_good(group):
        assert group.size == 1
"""
IN_A_RANK = """
    import os, sys
    if sys.argv[0].endswith("worker.py"):
"""


@pytest.fixture(autouse=True)
def only_self(pytester):
    """One rank without MPI, where nothing else is said, starts fast."""
    pytester.makeini("[pytest]\nsamestep_backends = self")


def passed(text):
    """The names of the tests that -v shows as passed, in the order in which they ran."""
    return re.findall(r"^(\S+) PASSED", text, re.MULTILINE)


@pytest.mark.slow
def test_files_share_one_launch_for_each_number_of_ranks(pytester):
    first = """
    import pytest

    @pytest.mark.ranks(2, 1, backends=["mpi"])
    def test_sum(group):
        assert group.allreduce(1) == group.size
    """
    second = """
    import pytest

    @pytest.mark.ranks(2, backends=["mpi"])
    def test_z(group):
        assert group.size == 2

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("x", [3, 1, 2])
    def test_a(ranks, x):
        pass

    def test_unmarked():
        pass
    """
    pytester.makepyfile(test_a=first, test_b=second)
    code, text = run_all(pytester, "-v")
    assert code == 0, text
    assert passed(text) == [
        "test_b.py::test_unmarked",
        "test_a.py::test_sum[mpi-1]",
        *(f"test_b.py::test_a[ranks-1-{x}]" for x in (3, 1, 2)),
        "test_a.py::test_sum[mpi-2]",
        "test_b.py::test_z[mpi-2]",
    ]
    assert "; 2 launches\n" in text


@pytest.mark.slow
def test_a_launch_of_its_own_is_shared_by_no_file(pytester):
    body = """
    import pytest

    @pytest.mark.ranks(1, fresh=True)
    def test_fresh(group):
        pass
    """
    pytester.makepyfile(test_a=body, test_b=body, test_c=GOOD)
    code, text = run_all(pytester)
    assert code == 0, text
    assert "; 3 launches\n" in text


@pytest.mark.slow
def test_after_a_failure_the_files_that_are_left_share_fresh_ranks(pytester):
    bad = """
    import pytest

    @pytest.mark.ranks(1)
    def test_bad(group):
        assert group.size == 2
    """
    pytester.makepyfile(test_a=bad, test_b=GOOD, test_c=GOOD)
    code, text = run_all(pytester)
    assert code == 1
    assert "1 failed, 2 passed" in text
    assert "; 2 launches\n" in text


def test_a_file_that_the_ranks_cannot_import_fails_alone(pytester):
    broken = IN_A_RANK + '        raise ImportError("not in a rank")\n' + GOOD
    pytester.makepyfile(test_a=GOOD, test_b=broken, test_c=GOOD)
    code, text = run_all(pytester, "-v")
    assert code == 1
    assert passed(text) == ["test_a.py::test_good[self-1]", "test_c.py::test_good[self-1]"]
    assert "rank 0 could not collect test_b.py" in text
    assert "ImportError: not in a rank" in text
    assert re.search(r"2 passed,.* 1 error", text)
    assert "; 1 launch\n" in text


@pytest.mark.slow
def test_a_file_that_ends_the_ranks_when_it_is_imported_fails_alone(pytester):
    deadly = IN_A_RANK + "        os._exit(5)\n" + GOOD
    pytester.makepyfile(test_a=GOOD, test_b=deadly, test_c=GOOD)
    code, text = run_all(pytester, "-v")
    assert code == 1
    assert passed(text) == ["test_a.py::test_good[self-1]", "test_c.py::test_good[self-1]"]
    assert re.search(r"2 passed,.* 1 error", text)


def test_module_fixtures_end_with_their_file_and_folders_have_their_own(pytester):
    conftest = """
    import pytest

    @pytest.fixture(scope="package")
    def folder():
        yield {!r}
    """
    first = """
    import builtins
    import pytest

    @pytest.fixture(scope="module")
    def open_here():
        builtins.seen = ["open"]
        yield
        builtins.seen.append("closed")

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("i", [0, 1])
    def test_open(open_here, folder, group, i):
        import builtins
        assert builtins.seen == ["open"]
        assert folder == "first"
    """
    second = """
    import builtins
    import pytest

    @pytest.mark.ranks(1)
    def test_closed(group, folder):
        assert builtins.seen == ["open", "closed"]
        assert folder == "second"
    """
    for folder, body in {"first": first, "second": second}.items():
        package = pytester.mkpydir(folder)
        (package / "conftest.py").write_text(dedent(conftest).format(folder))
        (package / "test_it.py").write_text(dedent(body))
    code, text = run_all(pytester)
    assert code == 0, text
    assert "; 1 launch\n" in text


@pytest.mark.slow
def test_fixtures_of_the_session_live_as_long_as_the_launch(pytester):
    pytester.makeconftest(
        """
        import pytest

        count = []

        @pytest.fixture(scope="session")
        def once():
            count.append(1)
            return count
        """
    )
    body = """
    import pytest

    @pytest.mark.ranks(1)
    def test_once(once, group):
        assert once == [1]
    """
    pytester.makepyfile(test_a=body, test_b=body)
    code, text = run_all(pytester)
    assert code == 0, text
    assert "; 1 launch\n" in text


@pytest.mark.slow
def test_single_tests_can_be_chosen(pytester):
    pytester.makepyfile(test_a=GOOD, test_b=GOOD, test_c=GOOD)
    chosen = ["test_c.py::test_good[self-1]", "test_a.py::test_good[self-1]"]
    code, text = run_all(pytester, "-v", *chosen)
    assert code == 0, text
    assert passed(text) == chosen
    assert "; 1 launch\n" in text
