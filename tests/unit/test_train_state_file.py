"""A state file gives back what was saved, bits and classes, whatever the program has before it reads."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import samestep as ss


class Pair(NamedTuple):
    a: Any
    b: Any


def back(path, saved, before):
    backend = ss.initialize()
    ss.TrainState(backend, part=saved).save(path)
    state = ss.TrainState(backend, part=before)
    state.restore(path)
    return state.part


@pytest.mark.parametrize(
    "saved",
    [
        None,
        True,
        2**80,
        0.1,
        float("inf"),
        "b",
        1 + 2j,
        np.float64(0.1),
        np.float32(0.1),
        np.bool_(True),
        np.ones(3),
    ],
)
@pytest.mark.parametrize("before", [None, 0, 0.0, np.float64(0)])
def test_scalars_keep_their_class(tmp_path, saved, before):
    found = back(tmp_path / "f", saved, type(saved)(0) if isinstance(saved, complex) else before)
    assert type(found) is type(saved)
    assert repr(found) == repr(saved)


@pytest.mark.parametrize("name", ["file", "allow_pickle", "part"])
def test_torch_in_any_tree(tmp_path, name):
    torch = pytest.importorskip("torch")
    backend = ss.initialize()

    def tree(x):
        leaves = [torch.full((2,), x, dtype=torch.bfloat16), np.full(2, x), np.float32(x), x]
        return {"list": leaves, "pair": Pair(leaves[0], leaves[1])}

    for made in (lambda x: tree(x)["list"], tree):
        ss.TrainState(backend, **{name: made(0.1)}).save(tmp_path / "f")
        state = ss.TrainState(backend, **{name: made(0.0)})
        state.restore(tmp_path / "f")
        assert repr(getattr(state, name)) == repr(made(0.1))


def test_an_optimizer_with_a_learning_rate_of_numpy(tmp_path):
    torch = pytest.importorskip("torch")
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.ones(2)

    def opt():
        return torch.optim.Adam([{"params": [w], "lr": np.float64(0.1)}])

    saved, other = opt(), opt()
    saved.step()
    found = back(tmp_path / "f", saved, other)
    assert found is other
    assert repr(found.state_dict()) == repr(saved.state_dict())


@pytest.mark.parametrize("content", [b"", b"half a file", "half", "numpy"])
def test_what_is_no_state_file_is_refused(tmp_path, content):
    backend = ss.initialize()
    path = tmp_path / "f.npy"
    state = ss.TrainState(backend, part=1.0)
    if content == "half":
        state.save(path)
        content = path.read_bytes()[:100]
    if content == "numpy":
        np.save(path, np.zeros(2))
    else:
        path.write_bytes(content)
    with pytest.raises(ss.UnavailableError, match=r"TrainState\.restore: .*f\.npy: "):
        state.restore(path)
    assert state.part == 1.0
