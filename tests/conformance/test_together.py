"""A block of `together()`: an exception on one rank ends it on all ranks, and the group stays usable."""

import contextlib
import re
import signal

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


class BadBatch(Exception):
    pass


@pytest.fixture(autouse=True)
def the_group_goes_on(group):
    """After each test: the group adds, and moves messages in a ring."""
    yield
    for count in (1, 3, 100_000):
        total = group.allreduce(np.full(count, group.rank + 1.0))
        assert (total == group.size * (group.size + 1) / 2).all()
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    sent = group.isend(np.array([group.rank]), after)
    assert group.recv(np.zeros(1, np.int64), before)[0] == before
    sent.wait()


def raise_on(group, rank, text="of this rank"):
    if group.rank == rank:
        raise BadBatch(text)


def check(caught, group, rank, kind="BadBatch", text="of this rank"):
    error = caught.value
    assert (error.rank, error.kind, error.text) == (rank, kind, text)
    assert re.search(r"test_together\.py:\d+, in ", error.line)
    for part in (f"rank {rank} raised {kind}: {text}", error.line, group.name):
        assert part in str(error)
    assert isinstance(error.__cause__, BadBatch) == (group.rank == rank)


# ---- six ways to leave


def test_an_exception_before_a_collective(group):
    for rank in range(group.size):
        with pytest.raises(ss.StepError) as caught, group.together():
            raise_on(group, rank)
            group.allreduce(np.ones(3))
        check(caught, group, rank)


@pytest.mark.parametrize("count", [1, 5_000, 3_000_000])
def test_an_exception_where_others_wait_in_a_collective(group, count):
    values = np.ones(count)
    with pytest.raises(ss.StepError) as caught, group.together():
        group.allreduce(values)
        raise_on(group, group.size - 1)
        for _ in range(2):
            group.allreduce(values)
    check(caught, group, group.size - 1)


def test_an_exception_after_a_collective(group):
    with pytest.raises(ss.StepError) as caught, group.together():
        group.allreduce(np.ones(3))
        raise_on(group, 0)
    check(caught, group, 0)


def test_all_ranks_skip(group):
    for step in range(4):
        with group.together():
            if group.any(group.rank == 0 and step % 2 == 0):
                continue
            assert group.allreduce(1) == group.size


def test_all_ranks_return_early(group):
    def step():
        with group.together():
            if not group.all(group.rank >= 0):
                return "not all"
            if group.all(True):
                return "early"
            group.barrier()
        return "late"

    assert step() == "early"


def test_one_rank_returns_early(group):
    if group.size == 1:
        return
    why = "waits for rank 1.*at the end of the block without this call"
    with pytest.raises(ss.StepError, match=why), group.together():
        if group.rank != 1:
            group.allreduce(np.ones(3))


def test_one_rank_exits(group):
    left = group.size - 1
    outcome = pytest.raises(SystemExit if group.rank == left else ss.StepError)
    if group.size == 1:
        outcome = pytest.raises(SystemExit)
    with outcome as caught, group.together():
        if group.rank == left:
            raise SystemExit(3)
        group.barrier()
    if group.rank != left:
        assert caught.value.kind == "SystemExit"


# ---- wherever they are


def wait_for_nothing(group, how):
    values = np.ones(10)
    if how == "work":
        group.iallreduce(values).wait()
    elif how == "recv":
        group.recv(values, (group.rank + 1) % group.size)
    elif how == "any source":
        group.recv(values)
    elif how == "object":
        group.recv_object((group.rank + 1) % group.size)
    elif how == "long message":
        group.send(np.ones(1_000_000), (group.rank + 1) % group.size)
    elif how == "split":
        group.split(0)
    elif how == "tree":
        group.allreduce_gradients({"a": np.ones(3), "b": [np.ones(5), np.ones(7)]})
    else:
        group.allgather_object("text") if hasattr(group, "allgather_object") else group.barrier()


@pytest.mark.parametrize(
    "how", ["work", "recv", "any source", "object", "long message", "split", "tree", "objects"]
)
def test_whatever_others_wait_for_ends(group, how):
    with pytest.raises(ss.StepError) as caught, group.together():
        raise_on(group, 0)
        wait_for_nothing(group, how)
    check(caught, group, 0)


def test_exceptions_on_several_ranks_are_one_error(group):
    with pytest.raises(ss.StepError) as caught, group.together():
        raise BadBatch("everywhere")
    assert (caught.value.rank, caught.value.kind) == (0, "BadBatch")
    assert isinstance(caught.value.__cause__, BadBatch)
    if group.size > 1:
        assert "so did rank" in str(caught.value)


def test_an_error_that_another_error_hides(group):
    """What a rank makes of the StepError that ends its wait is no cause."""
    with pytest.raises(ss.StepError) as caught, group.together():
        raise_on(group, group.size - 1)
        try:
            group.barrier()
        except ss.StepError as error:
            raise RuntimeError("training failed") from error
    check(caught, group, group.size - 1)


def test_a_swallowed_error_ends_the_block_all_the_same(group):
    with pytest.raises(ss.StepError) as caught, group.together():
        raise_on(group, 0)
        with contextlib.suppress(ss.StepError):
            group.barrier()
        with contextlib.suppress(ss.StepError):
            group.allreduce(np.ones(1))
    check(caught, group, 0)


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, which it does not in the background jobs of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_it_on_all_ranks(group):
    outcome = pytest.raises(KeyboardInterrupt if group.rank == 0 else ss.StepError)
    with outcome as caught, group.together():
        if group.rank == 0:
            signal.raise_signal(signal.SIGINT)
        group.barrier()
    if group.rank > 0:
        assert (caught.value.rank, caught.value.kind) == (0, "KeyboardInterrupt")


def test_an_error_of_the_package_is_named(group):
    with pytest.raises(ss.StepError) as caught, group.together():
        group.allreduce(np.ones(3), "no such operator" if group.rank == 0 else "sum")
    assert (caught.value.rank, caught.value.kind) == (0, "InvalidArgumentError")


def test_what_was_started_before_the_block_is_dropped(group):
    early = group.irecv(np.zeros(2), (group.rank + 1) % group.size, tag=5)
    with pytest.raises(ss.StepError), group.together():
        raise_on(group, 0)
        group.barrier()
    if group.size > 1:
        with pytest.raises(ss.StepError):
            early.wait()
    else:
        group.send(np.zeros(2), 0, tag=5)
        early.wait()


# ---- nested, and groups made from the group


def test_an_inner_block_may_be_caught(group):
    with group.together():
        for attempt in range(3):
            with contextlib.suppress(ss.StepError), group.together():
                raise_on(group, attempt % group.size)
                group.barrier()
            assert group.allreduce(1) == group.size


def test_an_inner_block_that_is_not_caught_ends_the_outer(group):
    with pytest.raises(ss.StepError) as caught, group.together(), group.together():
        raise_on(group, 0)
        group.barrier()
    assert (caught.value.rank, caught.value.kind) == (0, "BadBatch")


def test_an_exception_in_the_outer_block_ends_the_inner(group):
    with pytest.raises(ss.StepError) as caught, group.together():
        raise_on(group, group.size - 1)
        with contextlib.suppress(ss.StepError), group.together():
            group.barrier()
        with contextlib.suppress(ss.StepError):
            group.barrier()
    check(caught, group, group.size - 1)


def test_groups_made_from_it_end_and_go_on(group):
    pair = group.split(group.rank % 2)
    inner = pair.split(0)
    with pytest.raises(ss.StepError) as caught, group.together():
        raise_on(group, group.size - 1)
        inner.barrier()
        with contextlib.suppress(ss.StepError), pair.together():
            pair.barrier()
        inner.barrier()
        group.barrier()
    check(caught, group, group.size - 1)
    for one in (inner, pair):
        assert one.allreduce(1) == one.size
        with one.together():
            assert one.allreduce(1) == one.size
    inner.close()
    pair.close()


def test_a_block_of_a_part_leaves_the_rest_alone(group):
    pair = group.split(group.rank % 2)
    before = group.iallreduce(np.ones(3))
    if group.rank % 2 == 0:
        with pytest.raises(ss.StepError), pair.together():
            raise_on(pair, 0)
            pair.barrier()
    assert (before.wait() == group.size).all()
    assert pair.allreduce(1) == pair.size
    pair.close()


def test_a_group_that_is_being_made_is_lost_with_the_block(group):
    with pytest.raises(ss.StepError) as caught, group.together():
        if group.rank == 0:
            raise BadBatch("of this rank")
        group.split(0)
    check(caught, group, 0)


def test_blocks_that_ranks_do_not_share(group):
    if group.size == 1:
        return
    with pytest.raises((ss.StepError, ss.MismatchError)), group.together():
        if group.rank == 0:
            with group.together():
                pass


# ---- loops over steps


def test_a_loop_over_steps_goes_on_after_a_bad_step(group):
    seen, bad = [], 0
    for batch in ss.steps(group, range(3 + group.rank)):
        try:
            with group.together():
                if batch == 1 and group.rank == 0:
                    raise BadBatch("1")
                group.allreduce(np.ones(4))
        except ss.StepError:
            bad += 1
            continue
        seen.append(batch)
    assert bad == 1
    assert len(seen) == 3 + group.size - 2


def test_many_bad_steps_do_not_grow_the_process(group):
    def rss():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    def n_regions():  # of shared memory; those that no rank has used are no part of rss()
        with open("/proc/self/maps", encoding="ascii") as file:
            return sum("memfd:samestep" in line for line in file)

    def bad_step():
        values = np.ones(500_000)
        with pytest.raises(ss.StepError), group.together():
            raise_on(group, 0)
            group.allreduce(values)

    if group.transport in ("mpi", "hierarchical"):
        return  # MPI cannot take back what was sent: see docs/same-step.md
    for _ in range(5):
        bad_step()
    before, regions = rss(), n_regions()
    for _ in range(10):
        bad_step()
    assert rss() - before < 20e6
    assert n_regions() <= regions


# ---- decisions


def test_any_and_all_are_the_same_everywhere(group):
    for rank in range(group.size):
        assert group.any(group.rank == rank) is True
        assert group.all(group.rank == rank) is (group.size == 1)
    assert ss.any(group, False) is False
    assert ss.all(group, True) is True


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "int64"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_element_on_one_rank_is_found(group, dtype, value):
    last = group.size - 1
    values = np.ones((3, 4), dtype)
    assert group.all_finite([values, {"loss": 1.0}])
    if not dtype.startswith("int"):
        if group.rank == last:
            values[2, 1] = value
        assert not group.all_finite([values.T, np.ones(0, dtype)])
    assert not ss.all_finite(group, [1.0, value if group.rank == last else 2, "text", None])
