"""The plans: every leaf in exactly one message, none too full, the same on every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samestep.arrays import ArrayInfo
from samestep.trees.fusion import (
    BUCKET_NBYTES,
    DEVICE_BUCKET_NBYTES,
    SMALL_NBYTES,
    plan_buckets,
    plan_messages,
)

sizes = st.lists(st.integers(0, 50), max_size=40)


@given(sizes, st.integers(1, 60))
def test_buckets_cover_all_leaves_in_order(leaf_nbytes, bucket_nbytes):
    buckets = plan_buckets(leaf_nbytes, bucket_nbytes)
    assert [i for bucket in buckets for i in bucket] == list(range(len(leaf_nbytes)))
    assert all(len(bucket) > 0 for bucket in buckets)


@given(sizes, st.integers(1, 60))
def test_only_a_single_leaf_may_exceed_the_bucket(leaf_nbytes, bucket_nbytes):
    for bucket in plan_buckets(leaf_nbytes, bucket_nbytes):
        assert len(bucket) == 1 or sum(leaf_nbytes[i] for i in bucket) <= bucket_nbytes


@given(sizes, st.integers(1, 60))
def test_no_bucket_could_have_taken_the_next_leaf(leaf_nbytes, bucket_nbytes):
    for bucket in plan_buckets(leaf_nbytes, bucket_nbytes)[:-1]:
        assert sum(leaf_nbytes[i] for i in bucket) + leaf_nbytes[bucket.stop] > bucket_nbytes


@pytest.mark.parametrize("bucket_nbytes", [0, -1])
def test_a_bucket_must_hold_something(bucket_nbytes):
    with pytest.raises(ValueError, match="must be positive"):
        plan_buckets([1], bucket_nbytes)


def info(dtype, shape, nbytes, device):
    return ArrayInfo((dtype, shape, (), nbytes, False, True, device, 0, 0, True))


leaves = st.lists(
    st.tuples(
        st.sampled_from(["float32", "float64", "int8"]),
        st.sampled_from([0, 1, 100, SMALL_NBYTES - 1, SMALL_NBYTES, 3 * BUCKET_NBYTES, DEVICE_BUCKET_NBYTES]),
        st.sampled_from(["cpu", "cpu", "cpu", "cuda"]),
    ).map(lambda leaf: info(leaf[0], (leaf[1],), leaf[1], leaf[2])),
    max_size=60,
)


@given(leaves, st.booleans(), st.booleans())
def test_each_leaf_with_elements_is_in_one_message(infos, mix_dtypes, with_nccl):
    messages = plan_messages(infos, mix_dtypes=mix_dtypes, with_nccl=with_nccl)
    assert sorted(i for message in messages for i in message) == [
        i for i, info in enumerate(infos) if info.nbytes
    ]


@given(leaves, st.booleans(), st.booleans())
def test_what_travels_together_is_small_in_one_kind_of_memory_and_of_one_dtype(infos, mix_dtypes, with_nccl):
    for message in plan_messages(infos, mix_dtypes=mix_dtypes, with_nccl=with_nccl):
        if len(message) > 1:
            members = [infos[i] for i in message]
            by_nccl = with_nccl and members[0].device == "cuda"
            most = DEVICE_BUCKET_NBYTES if by_nccl else SMALL_NBYTES
            assert all(info.nbytes < most and info.device == members[0].device for info in members)
            assert sum(info.nbytes for info in members) <= (
                DEVICE_BUCKET_NBYTES if by_nccl else BUCKET_NBYTES
            )
            assert mix_dtypes or len({info.dtype for info in members}) == 1


@given(leaves, st.booleans(), st.booleans())
def test_messages_are_ordered_by_when_they_are_complete(infos, mix_dtypes, with_nccl):
    messages = plan_messages(infos, mix_dtypes=mix_dtypes, with_nccl=with_nccl)
    last = [message[-1] for message in messages]
    assert last == sorted(last)


def test_a_tree_of_200_leaves_of_10_kB_is_one_message():
    infos = [info("float32", (2500,), 10_000, "cpu")] * 200
    assert len(plan_messages(infos, mix_dtypes=False)) == 1


def test_nccl_moves_large_leaves_together():
    infos = [info("float32", (1 << 20,), 4 << 20, "cuda")] * 13
    assert list(map(len, plan_messages(infos, mix_dtypes=False, with_nccl=True))) == [6, 6, 1]
    assert len(plan_messages(infos, mix_dtypes=False)) == 13
