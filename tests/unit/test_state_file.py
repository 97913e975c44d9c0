"""Files of a training state: what is written comes back with its bits, whole or not at all."""

import os

import numpy as np
import pytest
import samestep as ss
from samestep import state_file

ml_dtypes = pytest.importorskip("ml_dtypes")

TREE = {
    "float": np.arange(6.0).reshape(2, 3),
    "strided": np.arange(12, dtype=np.int16)[::2],
    "none": np.zeros((0, 3), np.float32),
    "scalar": np.array(-0.0),
    "nan": np.array([np.nan, np.inf], np.float16),
    "half": np.arange(3).astype(ml_dtypes.bfloat16),
    "flags": np.array([True, False]),
    "numbers": [1, 2.5, True, None, "text"],
    "own": np.float32(0.1),
}


def state(**parts):
    return {"step": 3, "sampler": {"epoch": 1, "visited": 20}, "parts": parts}


def test_trees_come_back_with_their_bits(tmp_path):
    path = str(tmp_path / "state.npz")
    state_file.write(path, state(tree=TREE, other=np.ones(2)))
    empty = {
        name: np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf for name, leaf in TREE.items()
    }
    empty["numbers"] = [0, 0.0, False, None, ""]
    empty["own"] = np.float32(0)
    found = state_file.read(path, {"tree": empty, "other": np.zeros(2)})
    assert (found["step"], found["sampler"]) == (3, {"epoch": 1, "visited": 20})
    for name, leaf in TREE.items():
        mine = found["parts"]["tree"][name]
        if name == "numbers":
            assert mine == leaf
            assert [type(each) for each in mine] == [type(each) for each in leaf]
        else:
            assert (type(mine), mine.dtype, mine.shape) == (type(leaf), leaf.dtype, leaf.shape)
            assert mine.tobytes() == np.ascontiguousarray(leaf).tobytes()
    assert os.listdir(tmp_path) == ["state.npz"]


def test_another_library_gets_arrays_of_its_own(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    path = str(tmp_path / "state.npz")
    state_file.write(path, state(p=jnp.arange(4, dtype=jnp.bfloat16)))
    found = state_file.read(path, {"p": jnp.zeros(4, jnp.bfloat16)})["parts"]["p"]
    assert isinstance(found, type(jnp.zeros(1)))
    assert found.dtype == jnp.bfloat16
    assert found.tolist() == [0, 1, 2, 3]


def test_parts_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    path = str(tmp_path / "state.npz")
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    state_file.write(path, state(model=model.state_dict(), opt=opt.state_dict()))
    fresh = torch.optim.AdamW(model.parameters())
    found = state_file.read(path, {"model": {}, "opt": fresh.state_dict()})["parts"]
    for name, value in model.state_dict().items():
        assert torch.equal(found["model"][name], value)
    fresh.load_state_dict(found["opt"])
    for mine, other in zip(fresh.state.values(), opt.state.values(), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in other)


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "state.npz"
    state_file.write(str(path), state(p=np.ones(1)))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"p\['a'\] is a object"):
        state_file.write(str(path), state(p={"a": object()}))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state.npz"]
    with pytest.raises(OSError, match="No such file"):
        state_file.write(str(tmp_path / "missing" / "state.npz"), state(p=np.ones(1)))


@pytest.mark.parametrize(
    "parts",
    [{"q": np.ones(2)}, {"p": np.ones(3)}, {"p": np.ones(2, np.float32)}, {"p": {"a": np.ones(2)}}, {}],
)
def test_another_program_is_refused(tmp_path, parts):
    path = str(tmp_path / "state.npz")
    state_file.write(path, state(p=np.ones(2)))
    with pytest.raises(ss.MismatchError):
        state_file.read(path, parts)
