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
