"""Files of a training state: what is written comes back with its bits, whole or not at all."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

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


KILLED = """
import os, signal, sys
import numpy as np
from samestep import state_file

sys.addaudithook(lambda event, args: event == "os.rename" and os.kill(os.getpid(), signal.SIGKILL))
state_file.write(sys.argv[1], {"step": 1, "sampler": None, "parts": {"w": np.ones(2)}})
"""


def leave(path):
    """What a writer leaves that is killed."""
    known = set(os.listdir(path.parent))
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = set(os.listdir(path.parent)) - known
    return left


def test_what_a_killed_writer_has_left_is_removed(tmp_path):
    left, other = leave(tmp_path / "state.npz"), leave(tmp_path / "state.npz.best")
    own = {other, ".state.npz.0123456789abcdef0", ".state.npz.mine", ".state.npz"}
    for name in own - {other}:
        (tmp_path / name).touch()
    state_file.write(str(tmp_path / "state.npz"), state(w=np.ones(2)))
    assert set(os.listdir(tmp_path)) == {*own, "state.npz"}
    assert left not in own


def test_two_write_one_file(monkeypatch, tmp_path):
    """The second one sees the first at each moment of its work, and removes nothing of it."""
    path, savez, n_open = str(tmp_path / "state.npz"), np.savez, []

    def save(file, **members):
        n_open.append(len(os.listdir(tmp_path)))
        if len(n_open) == 1:
            savez(file, **members)
            state_file.write(path, state(w=np.full(2, 2.0)))
        else:
            savez(file, **members)

    monkeypatch.setattr(np, "savez", save)
    state_file.write(path, state(w=np.full(2, 1.0)))
    assert n_open == [1, 2]
    assert os.listdir(tmp_path) == ["state.npz"]
    assert state_file.read(path, {"w": np.zeros(2)})["parts"]["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("how", ["is removed", "is being removed", "cannot be locked"])
def test_a_file_that_is_not_locked_yet(monkeypatch, tmp_path, how):
    """Another writer takes it for one that is left over; or there are no locks."""
    flock, n_calls, path = fcntl.flock, [], str(tmp_path / "state.npz")

    def lock(file, flags):
        n_calls.append(file.name)
        if how == "cannot be locked":
            raise OSError(errno.ENOLCK, "no locks")
        if len(n_calls) == 1:
            os.unlink(file.name)
            if how == "is being removed":
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        flock(file, flags)

    monkeypatch.setattr(fcntl, "flock", lock)
    state_file.write(path, state(w=np.ones(2)))
    assert len(set(n_calls)) == (1 if how == "cannot be locked" else 2)
    assert os.listdir(tmp_path) == ["state.npz"]


@pytest.mark.parametrize(
    "parts",
    [{"q": np.ones(2)}, {"p": np.ones(3)}, {"p": np.ones(2, np.float32)}, {"p": {"a": np.ones(2)}}, {}],
)
def test_another_program_is_refused(tmp_path, parts):
    path = str(tmp_path / "state.npz")
    state_file.write(path, state(p=np.ones(2)))
    with pytest.raises(ss.MismatchError):
        state_file.read(path, parts)


def test_types_that_numpy_does_not_tell_apart_are_compared(tmp_path):
    jax = pytest.importorskip("jax")
    path = str(tmp_path / "state")

    def of(dtype):
        return {"x": jax.numpy.full(3, 2, dtype)}

    def key(kind):
        return [jax.random.key(5, impl=kind)]

    for make, kinds in (of, ["float8_e4m3fn", "float8_e4m3b11fnuz", "int4"]), (key, ["rbg", "unsafe_rbg"]):
        for kind in kinds:
            state_file.write(path, state(p=make(kind)))
            (got,) = jax.tree.leaves(state_file.read(path, {"p": make(kind)})["parts"]["p"])
            assert str(got.dtype) == str(jax.tree.leaves(make(kind))[0].dtype)
            for other in set(kinds) - {kind}:
                with pytest.raises(ss.MismatchError, match=f"the file has .*{kind}, not .*{other}"):
                    state_file.read(path, {"p": make(other)})
