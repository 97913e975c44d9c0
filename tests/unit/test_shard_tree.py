"""Which shards each rank has, and how many partial sums the tree over them keeps."""

import pytest
from samestep.step.shards import Node, PairwiseTree, is_one_node_each, shards_of


def test_ranks_hold_all_shards_between_them_in_order():
    for n_shards in range(1, 70):
        for size in range(1, n_shards + 3):
            runs = [shards_of(n_shards, rank, size) for rank in range(size)]
            assert [shard for run in runs for shard in run] == list(range(n_shards))
            assert max(map(len, runs)) == -(-n_shards // size)
            if not is_one_node_each(n_shards, size):
                assert min(map(len, runs)) >= max(map(len, runs)) - 1


def most_kept(n_shards, size):
    """The largest number of partial sums on a rank at any time."""
    most = 0
    for rank in range(size):
        tree = PairwiseTree(n_shards, lambda value, siblings: None)
        for shard in shards_of(n_shards, rank, size):
            tree.add(Node(0, shard), None)
            most = max(most, len(tree.nodes))
    return most


@pytest.mark.parametrize("n_shards", [*range(1, 49), 64, 128])
def test_ranks_keep_at_most_the_logarithm_of_the_shards(n_shards):
    for size in range(1, n_shards + 2):
        assert most_kept(n_shards, size) <= max(1, (n_shards - 1).bit_length())


@pytest.mark.parametrize("n_shards", [97, 193, 194, 256, 299, 333, 512])
def test_ranks_keep_at_most_three_more_where_their_shards_begin_in_the_middle_of_a_subtree(n_shards):
    for size in range(1, 20):
        assert most_kept(n_shards, size) <= (n_shards - 1).bit_length() + 3
