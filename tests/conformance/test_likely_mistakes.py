"""What new users write first: the error names the call and shows what to write instead."""

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2)


def text_of(kind, call, *arguments, **keywords):
    with pytest.raises(kind) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


FORGOTTEN = {
    "DistributedOptimizer(backend, opt)": [object()],
    "ShardedOptimizer(backend, opt)": [object()],
    "DistributedSampler(backend, data)": [[1, 2]],
    "DistributedDataContainer(backend, data)": [[1, 2]],
    "Accumulator(backend)": [4],
    "synchronize(backend, tree)": [{"w": np.ones(2)}],
    "allreduce_gradients(backend, grads)": [{"w": np.ones(2)}],
    "allreduce_tree(backend, tree)": [{"w": np.ones(2)}],
    "metric_mean(backend, metrics)": [{"loss": (1.0, 2)}],
    "gather_metrics(backend, tree)": [np.ones(2)],
    "steps(backend, batches)": [[1, 2]],
    "same(backend, tree)": [{"w": np.ones(2)}],
    "allreduce(backend, x)": [np.ones(2)],
    "bcast(backend, x)": [np.ones(2)],
    "send(backend, x, dest)": [np.ones(2), 0],
    "println(backend, *args)": ["text"],
    "total_workers(backend)": [1],
}


@pytest.mark.parametrize("right", FORGOTTEN)
def test_the_backend_is_forgotten(group, right):
    name = right.partition("(")[0]
    function, arguments = getattr(ss, name), FORGOTTEN[right]
    for given in (arguments, [type(group), *arguments[1:]]):
        text = text_of(TypeError, function, *given)
        assert text.startswith(f"{name}: the first argument is the backend, got "), text
        assert f"call {right} with backend = samestep.get_distributed_backend()" in text


@pytest.mark.parametrize("name", ["DistributedSampler", "DistributedDataContainer"])
def test_data_that_only_one_rank_has(group, name):
    assert f"{name}: data is None; every rank passes all" in text_of(
        TypeError, getattr(ss, name), group, None
    )


def test_a_container_in_place_of_an_array(group):
    cure = "allreduce_gradients, allreduce_tree or synchronize, and any object to a verb such as bcast_object"
    verbs = ("allreduce", "reduce", "bcast", "allgather", "gather", "alltoall", "iallreduce")
    for verb in verbs:
        for given in ({"w": np.ones(2)}, [np.ones(2)], (1.0, 2.0), object()):
            text = text_of(TypeError, getattr(group, verb), given)
            assert f"{verb.removeprefix('i')}: expected an array" in text
            assert text.endswith(cure), text
        assert "holds numbers" in text_of(TypeError, getattr(group, verb), [1.0])


@pytest.mark.parametrize("verb", ["allreduce", "allgather", "alltoall"])
def test_an_out_that_cannot_be_written(group, verb):
    x = np.ones((group.size, 2))
    out = np.broadcast_to(np.zeros(()), (group.size, *x.shape) if verb == "allgather" else x.shape)
    text = text_of(ss.InvalidArgumentError, getattr(group, verb), x, out=out)
    assert text.startswith(f"{verb}: out: the array is read-only (numpy.ndarray); pass a writable copy")
    text = text_of(TypeError, getattr(group, verb), x, out=[0.0, 0.0])
    assert text.startswith(f"{verb}: out: expected an array")
    assert text.endswith("got list; pass an array that receives the result")


def test_the_buffers_of_mpi4py(group):
    x, y = np.ones((group.size, 2)), np.zeros((group.size, 2))
    for verb, right in {
        "allreduce": "allreduce(x, op, out=y)",
        "reduce": "reduce(x, op, root, out=y)",
        "reduce_scatter": "reduce_scatter(x, op, out=y)",
        "bcast": "bcast(x, root, out=y)",
        "gather": "gather(x, root, out=y)",
        "scatter": "scatter(x, root, out=y)",
        "allgather": "allgather(x, out=y)",
    }.items():
        call = getattr(group, verb)
        assert text_of(TypeError, call, x, y, *[0] * right.count(",")).endswith(f"by keyword: {right}")
        if verb != "allgather":
            assert "by keyword: out=" in text_of((TypeError, ss.InvalidArgumentError), call, x, y)
            name = "op" if "op" in right else "root"
            assert text_of(TypeError, call, x, y, **{name: 0}).endswith(f"by keyword: {right}")


def test_names_of_mpi4py_and_torch(group):
    for name, right in {
        "Get_rank": "rank",
        "Get_size": "size",
        "Barrier": "barrier()",
        "Split": "split(color, key)",
        "Bcast": "bcast(x, root)",
        "Allreduce": "allreduce(x, op, out=y)",
        "all_reduce": "allreduce(x, op)",
        "get_world_size": "size",
    }.items():
        text = text_of(AttributeError, getattr, group, name)
        assert text == f"a backend has no {name}: write backend.{right}"
        assert not hasattr(group, name)
        assert name not in dir(group)
        assert right.partition("(")[0] in dir(group)


def test_a_work_in_place_of_its_result(group):
    x = np.ones(3)
    work = group.iallreduce(x.copy())
    cure = "a Work is a pending operation, not an array: work.wait() returns the array"
    for use in (
        lambda: np.asarray(work),
        lambda: np.array([work]),
        lambda: work + 1,
        lambda: 2 * work,
        lambda: x - work,
        lambda: work[0],
        lambda: list(work),
        lambda: float(work),
        lambda: np.mean(work),
    ):
        assert text_of(TypeError, use) == cure
    assert text_of(AttributeError, lambda: work.shape) == f"{cure}, which has shape"
    assert text_of(AttributeError, getattr, work, "Wait") == "a Work has no Wait: write work.wait()"
    assert text_of(TypeError, group.allreduce, work).endswith("pass what its wait() returns")
    assert not {"shape", "Wait"} & set(dir(work))
    assert list(work.wait()) == [group.size] * 3


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        (
            {"loss": 0.5},
            "'loss' must be a sum and a count, {'loss': (loss * n, n)} for the mean over n items; got 0.5",
        ),
        ({"loss": (1.0, 2, 3)}, "'loss' must be a sum and a count"),
        (0.5, "the metrics are a dict, {'loss': (sum, count)}; got float"),
        ({1: (1.0, 2), "1": (2.0, 2)}, "names are texts; got 1"),
        ({("a", "b"): (1.0, 2)}, "names are texts; got ('a', 'b')"),
    ],
    ids=["number", "triple", "no dict", "number as name", "tuple as name"],
)
def test_metrics_without_counts_are_refused_on_all_ranks(group, metrics, named):
    given = metrics if group.rank == 0 else {"loss": (1.0, 2)}
    text = text_of(ss.InvalidArgumentError, ss.metric_mean, group, given)
    assert text.startswith(f"metric_mean: {named}")


def test_an_unknown_operator_is_refused_before_the_first_step(group):
    class Optimizer:
        def init(self, params):
            return ()

        def update(self, grads, state, params=None):
            return grads, state

    text = text_of(ss.InvalidArgumentError, ss.DistributedOptimizer, group, Optimizer(), op="mean")
    assert text.startswith(
        "DistributedOptimizer: op 'mean' is not a reduction; use one of sum, prod, min, max, avg"
    )
