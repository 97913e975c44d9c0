"""Groups on another backend than the world's."""

import numpy as np
import pytest
import samestep as ss
import samestep.distributed as dist
from dist_jobs import DistributedJob, launch
from libraries import assert_same, contribution
from running import program
from samestep._util import launchers

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


def is_right_on(part, kind):
    """The group adds up, and knows who it is."""
    assert dist.get_backend(part) == kind
    assert isinstance(part, {"gloo": ss.NativeBackend, "mpi": ss.MPIBackend}[kind])
    x = contribution(part.rank, 1009)
    dist.all_reduce(x, group=part)
    assert_same(x, np.asarray(sum(contribution(r, 1009) for r in range(part.size)), "f4"))


@pytest.mark.ranks(1, 2, 3)
def test_a_group_on_another_backend(group):
    other = {"mpi": "gloo", "gloo": "mpi"}[dist.get_backend()]
    if other == "mpi" and group.size > 1 and launchers.launcher().name not in launchers.MPI_LAUNCHERS:
        with pytest.raises(ss.UnavailableError, match=r"no launcher of MPI started it.*run --mpi"):
            dist.new_group(backend="mpi")
        return
    n_children = len(group._children)
    for ranks in ([0], None, range(1, group.size)):
        if ranks is not None and not list(ranks):
            continue
        part = dist.new_group(ranks, backend=other)
        if part is not OUTSIDE:
            is_right_on(part, other)
            dist.destroy_process_group(part)
    assert len(group._children) == n_children
    dist.barrier()


@pytest.mark.ranks(2)
def test_two_groups_on_another_backend_at_once(group):
    other = {"mpi": "gloo", "gloo": "mpi"}[dist.get_backend()]
    if other == "mpi" and launchers.launcher().name not in launchers.MPI_LAUNCHERS:
        pytest.skip("no launcher of MPI started these ranks")
    first, second = (dist.new_group(backend=other) for _ in range(2))
    one, two = np.ones(3), np.full(3, 10.0)
    requests = [dist.all_reduce(x, group=g, async_op=True) for x, g in ((one, first), (two, second))]
    for request in reversed(requests):
        request.wait()
    assert (one[0], two[0]) == (2, 20)
    for part in (second, first):
        dist.destroy_process_group(part)


TRANSPORTS = {  # the backends of the world and the group, variables, whether ranks call destroy_process_group
    "tcp": ("mpi", "gloo", {"SAMESTEP_NATIVE_TRANSPORT": "tcp"}, False),
    "mpi": ("gloo", "mpi", {"SAMESTEP_MPI_TRANSPORT": "mpi"}, False),
    "hierarchical over tcp": ("mpi", "gloo", {"SPREAD": "yes"}, True),
    "hierarchical over mpi": ("gloo", "mpi", {"SPREAD": "yes"}, True),
}


@pytest.mark.parametrize(
    "transport",
    [
        "hierarchical over mpi",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("tcp", "mpi", "hierarchical over tcp")),
    ],
)
def test_messages_of_another_backend(tmp_path, transport):
    """Without shared memory, or only within what are said to be hosts."""
    pytest.importorskip("mpi4py")
    world, other, env, destroys = TRANSPORTS[transport]
    use = program("distributed/dist_groups", "use_groups_of_another_backend", world, other, destroys)
    ended = DistributedJob(tmp_path, "-m", "samestep", "run", "--mpi", "--raw", "-n", 3, *use, env=env).wait()
    assert (ended.code, ended.left) == (0, []), ended.err
    assert ended.out.splitlines() == [f"{world} {other} {transport.partition(' ')[0]}"] * 3
    assert not ended.err


def test_mpi_has_to_reach_all_ranks_of_the_world(tmp_path):
    asks = program("distributed/dist_groups", "ask_for_a_group_over_mpi")
    ended = launch(tmp_path, asks, "--nproc_per_node=2", "--use_env")
    assert ended.code == 1
    assert (
        "on rank 0: no launcher of MPI started it; start the ranks with `samestep run --mpi -n 2`"
        in ended.err
    )
