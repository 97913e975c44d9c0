"""Files of stores on a disk that is full or gets full."""

import contextlib
import os
import subprocess

import pytest
import samestep as ss
from samestep.rendezvous import FileStore
from samestep.rendezvous.rendezvous import open_rendezvous


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two pages."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_gets_full(small_disk):
    with contextlib.closing(FileStore(str(small_disk / "store"))) as store:
        store.set("key", "value")
        for _ in range(2):
            with pytest.raises(
                ss.UnavailableError, match=r"store cannot be written: No space left on device; free"
            ):
                store.set("large", "x" * 8192)
        assert not store.check(["large"])
        assert store.get("key") == b"value"
        with contextlib.closing(FileStore(str(small_disk / "store"))) as other:
            other.set("small", "y")
            assert (other.get("key"), store.get("small")) == (b"value", b"y")


def test_a_disk_that_is_full(small_disk):
    (small_disk / "other").write_bytes(bytes(8192))
    path = str(small_disk / "store")
    for act in (lambda: FileStore(path), lambda: open_rendezvous(f"file://{path}", 0, 2, timeout=5)):
        with pytest.raises(ss.UnavailableError, match="store cannot be written: No space left on device"):
            act()
    (small_disk / "other").unlink()
    FileStore(path).close()
