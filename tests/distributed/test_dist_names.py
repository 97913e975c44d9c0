"""Names, operators and availability; none of them needs a world or imports torch."""

import copy
import pickle
import subprocess
import sys

import pytest
import samestep as ss
import samestep.distributed as dist


@pytest.mark.parametrize("name", ["gloo", "GLOO", "Gloo", "native", "NATIVE"])
def test_gloo_in_any_case(name):
    assert dist.Backend(name) == dist.Backend.GLOO == "gloo"
    assert type(dist.Backend(name)) is str


def test_the_other_names():
    assert (
        (dist.Backend("Mpi"), dist.Backend("NCCL"))
        == (dist.Backend.MPI, dist.Backend.NCCL)
        == ("mpi", "nccl")
    )


@pytest.mark.parametrize("name", ["tcp", "undefined", "", "gloo ", None, 3, ["gloo"]])
def test_what_is_no_backend_is_refused_with_those_that_are(name):
    with pytest.raises(
        ss.InvalidArgumentError, match=r"no backend.*usable here: 'gloo'.*not usable: 'nccl' \("
    ):
        dist.Backend(name)


def test_what_is_available():
    assert dist.is_available()
    assert dist.is_gloo_available()
    assert dist.is_mpi_available() is True  # the tests run on one
    assert dist.is_nccl_available() is False
    for name, usable in [
        ("GLOO", True),
        ("native", True),
        ("mpi", True),
        ("nccl", False),
        ("tcp", False),
        (3, False),
    ]:
        assert dist.is_backend_available(name) is usable


def test_mpi_is_not_available_where_its_library_is_not_found():
    program = "import samestep.distributed as d; print(d.is_mpi_available()); d.Backend('x')"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['mpi4py'] = None; " + program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "False\n"
    assert "not usable: 'mpi' (" in done.stderr


def test_operators():
    assert dist.ReduceOp.PRODUCT is ss.PROD
    for name in ("SUM", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR"):
        op = getattr(dist.ReduceOp, name)
        assert op is getattr(ss, name)
        assert pickle.loads(pickle.dumps(op)) is copy.deepcopy(op) is op
        assert {op: 1}[op] == 1


@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_the_old_name_warns_each_time(name):
    for _ in range(2):
        with pytest.warns(FutureWarning, match=f"reduce_op.{name}"):
            assert getattr(dist.reduce_op, name) is getattr(dist.ReduceOp, name)
    with pytest.raises(AttributeError, match="AVG"):
        _ = dist.reduce_op.AVG


def test_constants_can_be_copied_and_pickled():
    for constant in (dist.group.WORLD, dist.GroupMember.NON_GROUP_MEMBER):
        assert copy.copy(constant) is constant
        assert pickle.loads(pickle.dumps(constant)) is constant


def test_importing_it_imports_no_framework():
    program = "import sys, samestep.distributed; print(*sys.modules)"
    found = set(subprocess.check_output([sys.executable, "-c", program], text=True).split())
    assert not found & {"torch", "jax", "mpi4py", "multiprocessing", "ml_dtypes"}


def test_every_public_name_exists_once():
    assert sorted(set(dist.__all__)) == sorted(dist.__all__)
    assert all(hasattr(dist, name) for name in dist.__all__)


def test_before_there_is_a_world():
    dist.destroy_process_group()  # that of another test, if there is one
    assert not dist.is_initialized()
    dist.destroy_process_group()
    calls = [dist.get_rank, dist.get_world_size, dist.get_backend, dist.barrier, dist.new_group]
    calls += [lambda: dist.all_reduce("x"), lambda: dist.send("x", 0), lambda: dist.all_reduce_multigpu(1)]
    for call in calls:
        with pytest.raises(ss.NotInitializedError, match="init_process_group"):
            call()
