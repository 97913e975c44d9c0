"""Many small device arrays through one bucket: the kernels' own text runs, on the host, over every odd size."""

from __future__ import annotations

import os
import stat

import device_jobs
import fake_arrays
import fake_libraries
import numpy as np
import pytest
import samestep as ss
from samestep import _core, packing

GAP = 3  # bytes between leaves that no kernel may touch
LEAVES = [
    [1],
    [0, 3, 0],
    [5, 15, 16, 17, 31, 32, 33],
    [4 * k for k in range(40)],
    [2000 + k for k in range(128)],
    [40_007, 1, 16_384, 16_385],  # more than a block of threads moves
]


def packer_of(monkeypatch, tmp_path, edit="", cache=""):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("FAKE_NVRTC_EDIT", edit)
    runtime, nccl = fake_libraries.build()
    kernels = str(fake_libraries.kernels_of(nccl))
    made = _core.Packer(_core.GpuLibrary.open("cuda", str(runtime)), 0, kernels, kernels, cache)
    assert made.problem() == ""
    return made


def differences(packer, first=1, gap=GAP):
    """Where packing and unpacking leaves that begin `first` bytes after a page give other bytes than they should."""
    wrong = []
    stream = fake_arrays.Stream()
    for sizes in LEAVES:
        starts, at = [], first
        for size in sizes:
            starts.append(at)
            at += size + gap
        before = (np.arange(at + 1) % 251 + 1).astype("uint8")
        whole = fake_arrays.Array.of(before, stream)
        bucket = fake_arrays.Array.of(np.full(packing.bucket_nbytes(sizes) + 16, 255, "uint8"), stream)
        leaves = [(whole.address + start, size) for start, size in zip(starts, sizes, strict=True)]
        packer.pack(leaves, bucket.address, stream.handle)
        expected, place = np.full(bucket.shape, 255, "uint8"), 0
        for start, size in zip(starts, sizes, strict=True):
            padded = packing.bucket_nbytes([size])
            expected[place : place + padded] = 0
            expected[place : place + size] = before[start : start + size]
            place += padded
        if not np.array_equal(bucket.get(), expected):
            wrong.append(("pack", sizes[:3]))
        whole.set(np.full_like(before, 7))
        packer.unpack(leaves, bucket.address, stream.handle)
        after = np.full_like(before, 7)
        for start, size in zip(starts, sizes, strict=True):
            after[start : start + size] = before[start : start + size]
        if not np.array_equal(whole.get(), after):
            wrong.append(("unpack", sizes[:3]))
    return wrong


@pytest.mark.parametrize(("first", "gap"), [(0, 16), (4, 4), (2, 2), (1, GAP)])
def test_every_byte_arrives_and_no_other_changes(monkeypatch, tmp_path, first, gap):
    assert differences(packer_of(monkeypatch, tmp_path), first, gap) == []


@pytest.mark.parametrize(
    "edit",
    [
        "(nbytes + 15)=>(nbytes + 14)",
        "i < count; i += stride=>i + 1 < count; i += stride",
        "leaves.start[leaf]) * 16=>leaves.start[leaf]) * 8",
        "first = Size(blockIdx.x) * blockDim.x=>first = Size(blockIdx.x) * (blockDim.x - 1)",
        "from + done, nbytes - done=>from + done, nbytes - done + 1",
    ],
)
def test_a_mistake_in_a_kernel_is_found(monkeypatch, tmp_path, edit):
    """What the test above is good for."""
    assert differences(packer_of(monkeypatch, tmp_path, edit))


def test_moves_that_a_device_cannot_make_are_found(tmp_path):
    """A device moves 16 bytes only from and to multiples of 16; the stand-in dies of others."""
    script = """
from samestep import packing
packer = packing.packer("cuda", 0)
tell(problem=packer.problem())
x, stream = Array((64,), "uint8", Stream()), Stream()
packer.pack([(x.address + 4, 32)], x.address, stream.handle)
stream.synchronize()
tell(alive=True)
"""
    variables = {"FAKE_NVRTC_EDIT": "places % 16 == 0=>true", "SAMESTEP_KERNEL_CACHE": ""}
    (ended,) = device_jobs.run(tmp_path, script, 1, **variables)
    assert ended.told == [{"problem": ""}], ended
    assert ended.code < 0
    (ended,) = device_jobs.run(tmp_path, script, 1, SAMESTEP_KERNEL_CACHE="")
    assert ended.told == [{"problem": ""}, {"alive": True}], ended


def test_hip_has_the_same_face(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    runtime, nccl = fake_libraries.build(hip=True)
    kernels = str(fake_libraries.kernels_of(nccl))
    packer = _core.Packer(
        _core.GpuLibrary.open("rocm", str(runtime)), 0, kernels, kernels, str(tmp_path / "kept")
    )
    assert packer.problem() == ""
    assert not (tmp_path / "kept").exists()  # its architecture has no name that could be the file's


def test_too_many_leaves_are_refused(monkeypatch, tmp_path):
    with pytest.raises(ss.InvalidArgumentError, match="129 leaves"):
        packer_of(monkeypatch, tmp_path).pack([(0, 1)] * 129, 0, 0)


TREES = """
world = start()
FEW = os.environ.get("FEW") == "1"
SIZES = [1, 2, 3, 5, 0, 17, 1000, 4097, *range(20, 30 if FEW else 160), 200_001]
def leaf(r, k, dtype):
    return ((np.arange(SIZES[k]) + r + k) % 5 + 1).astype(dtype)
def wrong(got, expected):
    return sum(not np.array_equal(got[k].get(), expected(k)) for k in range(len(SIZES)))
ranks, stream = range(size), Stream()
found = {}
for dtype in ("float32", "float64", "int32", "uint8", "float16", "complex64")[: 1 if FEW else None]:
    tree = [Array.of(leaf(rank, k, dtype), stream) for k in range(len(SIZES))]
    found[dtype] = wrong(world.allreduce_tree(tree), lambda k: sum(leaf(r, k, dtype) for r in ranks))
    tree = [Array.of(leaf(rank, k, dtype), stream) for k in range(len(SIZES))]
    found["sync " + dtype] = wrong(ss.synchronize(world, tree, root=size - 1), lambda k: leaf(size - 1, k, dtype))
for name, op, f in (("avg", "avg", size), ("premul", ss.premul(0.25), 0.25)):
    tree = [Array.of(leaf(rank, k, "float32") * 4, stream) for k in range(len(SIZES))]
    scale = 4 / size if name == "avg" else 1
    got = world.allreduce_tree(tree, op)
    found[name] = wrong(got, lambda k: sum(leaf(r, k, "float32") for r in ranks) * np.float32(scale))
mixed = [Array.of(leaf(rank, k, ("float32", "int16", "uint8")[k % 3]), stream) for k in range(len(SIZES))]
found["mixed"] = wrong(ss.synchronize(world, mixed), lambda k: leaf(0, k, ("float32", "int16", "uint8")[k % 3]))
tell(**found)
world.close()
"""


def trees(tmp_path, n=2, **variables):
    ended = device_jobs.run(tmp_path, TREES, n, **variables)
    told = [rank.told for rank in ended]
    assert all(len(one) == 1 for one in told), ended
    return told[0][0] | {f"{name} on {r}": w for r, one in enumerate(told) for name, w in one[0].items()}


@pytest.mark.parametrize("in_progress", ["", "3"])
def test_trees_are_packed_and_exact(tmp_path, in_progress):
    """Also where NCCL puts its work into the stream after its call has returned."""
    counted = tmp_path / "compilations"
    variables = {
        "FAKE_NCCL_IN_PROGRESS": in_progress,
        "FAKE_GPU_DELAY_US": "300",
        "FAKE_NVRTC_COUNT": str(counted),
        "SAMESTEP_KERNEL_CACHE": "",
    }
    assert set(trees(tmp_path, **variables).values()) == {0}
    assert counted.read_text() == "compiled\n" * 2  # once on each rank


def test_a_wrong_kernel_makes_wrong_trees(tmp_path):
    """So the tests above go through the kernels, and only with the limit above 0."""
    wrong = {
        "FAKE_NVRTC_EDIT": "* 16;\n  move_leaf=>* 8;\n  move_leaf",
        "SAMESTEP_KERNEL_CACHE": "",
        "FEW": "1",
    }
    found = trees(tmp_path, **wrong)
    assert found["float32"] > 0
    assert found["mixed on 1"] > 0
    assert set(trees(tmp_path, **wrong, SAMESTEP_PACK_BELOW="0").values()) == {0}


@pytest.mark.parametrize("how", ["none", "broken", "full"])
def test_ranks_agree_not_to_pack_where_one_cannot(tmp_path, how):
    lacking = {
        "none": {"SAMESTEP_NVRTC_LIBRARY": "/nowhere"},
        "broken": {"FAKE_NVRTC_FAIL": "1"},
        "full": {"FAKE_GPU_LARGEST": str(16 << 20)},  # less than a bucket
    }[how]
    ended = device_jobs.run(tmp_path, TREES, 2, of_rank={1: lacking}, SAMESTEP_KERNEL_CACHE="", FEW="1")
    for rank in ended:
        assert rank.told, ended
        assert set(rank.told[0].values()) == {0}


def test_ranks_that_do_not_agree_learn_it_at_the_first_tree(tmp_path):
    script = """
from samestep import arrays, fusion
world = start()
tree = [Array.of(np.ones(9, "float32"), Stream()) for _ in range(9)]
def many():
    fusion.allreduce_leaves(world, tree, [arrays.info(x) for x in tree], "sum")
told(lambda: many() if rank else world.iallreduce(tree[0]).wait(host=True) and None)
told(lambda: world.iallreduce(tree[0]).wait(host=True) and None)
"""
    for rank in device_jobs.run(tmp_path, script, 2):
        assert [told.get("kind") for told in rank.told] == ["MismatchError"] * 2, rank
        assert all(told["seconds"] < 20 for told in rank.told)


def test_kernels_are_kept_for_this_user_only(monkeypatch, tmp_path):
    counted, folder = tmp_path / "compilations", tmp_path / "deep" / "kept"
    monkeypatch.setenv("FAKE_NVRTC_COUNT", str(counted))

    def made():
        packer = packer_of(monkeypatch, tmp_path, cache=str(folder))
        assert differences(packer) == []
        return len(counted.read_text().splitlines()), packer.cached

    assert made() == (1, False)
    (kept,) = folder.iterdir()
    assert "sm_90" in kept.name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert made() == (1, True)
    kept.write_bytes(b"damaged" * 100)
    assert made() == (2, False)
    assert made() == (2, True)
    kept.chmod(0o622)  # others may have put anything there
    assert made() == (3, False)
    kept.chmod(0o600)
    folder.chmod(0o777)
    assert made() == (4, False)
    folder.chmod(0o700)
    kept.unlink()
    kept.symlink_to(tmp_path / "elsewhere")
    assert made() == (5, False)
    monkeypatch.setenv("FAKE_GPU_CAPABILITY", "80")  # another device: kernels of its own
    assert made() == (6, False)
    assert len(list(folder.iterdir())) == 2


def test_where_the_compiler_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("SAMESTEP_NVRTC_LIBRARY", raising=False)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for major in ("12", "13"):
        place = tmp_path / {"12": "nvidia/cuda_nvrtc/lib", "13": "nvidia/cu13/lib"}[major]
        place.mkdir(parents=True)
        (place / f"libnvrtc.so.{major}").write_bytes(b"")
        assert packing.find_compiler("cuda", f"/x/libcudart.so.{major}.0").endswith(f"libnvrtc.so.{major}")
    assert packing.find_compiler("cuda", "/x/libcudart.so.11.8") == ""
    monkeypatch.setenv("SAMESTEP_NVRTC_LIBRARY", "/nowhere")
    assert packing.find_compiler("cuda", "/x/libcudart.so.13.0") == ""


def test_a_limit_that_is_no_number(monkeypatch):
    monkeypatch.setenv("SAMESTEP_PACK_BELOW", "many")
    with pytest.raises(ss.InvalidArgumentError, match="SAMESTEP_PACK_BELOW"):
        packing.below()
    monkeypatch.delenv("SAMESTEP_PACK_BELOW")
    assert packing.below() == packing.BELOW
    assert os.path.isabs(packing.cache_folder({"HOME": "/home/me"}))
