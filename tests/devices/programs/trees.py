"""Programs of test_device_trees.py: trees of many arrays."""

import json
import sys

import numpy as np
import samestep as ss
from device_rank import attempt, rank, report, size, start
from fake_arrays import Array, Stream


def reduce_trees():
    """Reports for each dtype and operator how many leaves are wrong."""
    world = start()
    sizes = [1, 2, 3, 5, 0, 17, 1000, 4097, *range(20, 300), 200_001]
    ranks, stream, found = range(size), Stream(), {}

    def leaf(r, k, dtype):
        return ((np.arange(sizes[k]) + r + k) % 5 + 1).astype(dtype)

    def tree_of(dtype_of, scale=1):
        return [Array.of(leaf(rank, k, dtype_of(k)) * scale, stream) for k in range(len(sizes))]

    def wrong(got, expected):
        return sum(not np.array_equal(got[k].get(), expected(k)) for k in range(len(sizes)))

    def check_dtype(dtype):
        got = world.allreduce_tree(tree_of(lambda _: dtype))
        found[dtype] = wrong(got, lambda k: sum(leaf(r, k, dtype) for r in ranks))
        got = ss.synchronize(world, tree_of(lambda _: dtype), root=size - 1)
        found["sync " + dtype] = wrong(got, lambda k: leaf(size - 1, k, dtype))

    def check_operator(name, op, scale):
        got = world.allreduce_tree(tree_of(lambda _: "float32", np.float32(4)), op)
        found[name] = wrong(got, lambda k: sum(leaf(r, k, "float32") for r in ranks) * np.float32(scale))

    for dtype in ("float32", "float64", "int32", "uint8", "float16", "complex64"):
        check_dtype(dtype)
    check_operator("avg", "avg", 4 / size)
    check_operator("premul", ss.premul(0.25), 1)

    def mixed(k):
        return ("float32", "int16", "uint8")[k % 3]

    found["mixed"] = wrong(ss.synchronize(world, tree_of(mixed)), lambda k: leaf(0, k, mixed(k)))
    report(**found)
    world.close()


def overlapping_leaves(backend):
    """Leaves that are parts of one array, in trees of one and of more operations; then a tree that all can use."""
    world = start(backend)
    x = Array.of(np.arange(300_000, dtype="float32"), Stream())
    parts = {"a": x.part(0, 5), "b": x.part(10, 20), "c": x.part(3, 8)}
    long = [x.part(0, 200_000), x.part(150_000, 300_000)]
    attempt(lambda: world.allreduce_tree(parts) and None)
    attempt(lambda: ss.synchronize(world, parts) and None)
    attempt(lambda: world.allreduce_tree(long) and None)
    one = x.part(0, 5)
    attempt(lambda: world.allreduce_tree([one, x.part(5, 8), x.part(0, 5), one])[2].get().tolist())
    world.close()


def disagree_at_a_tree():
    """Rank 0 reduces an array, rank 1 a tree."""
    from samestep import arrays
    from samestep.trees import fusion

    world = start()
    tree = [Array.of(np.ones(9, "float32"), Stream()) for _ in range(9)]

    def reduce_all():
        infos = [arrays.info(x) for x in tree]
        fusion.allreduce_leaves(world, tree, infos, ss.SUM.value, 1.0, names=[str(i) for i in range(9)])

    attempt(lambda: reduce_all() if rank else world.iallreduce(tree[0]).wait(host=True) and None)
    attempt(lambda: world.iallreduce(tree[0]).wait(host=True) and None)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
