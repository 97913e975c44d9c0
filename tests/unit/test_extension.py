"""The compiled module is linked against no MPI, CUDA or framework: they are found at run time."""

import re
import shutil
import subprocess

import pytest
from samestep import _core

FORBIDDEN = re.compile(r"lib(mpi|open-pal|pmi|nccl|rccl|cuda|amdhip|torch|jax|python)", re.IGNORECASE)


def test_the_extension_needs_no_library_but_the_systems():
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf (binutils) is not installed")
    shown = subprocess.check_output([readelf, "-d", _core.__file__], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", shown)
    assert needed, shown
    assert not [name for name in needed if FORBIDDEN.match(name)]


def test_the_extension_leaves_no_undefined_symbol_of_them():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm (binutils) is not installed")
    shown = subprocess.check_output([nm, "-D", "--undefined-only", _core.__file__], text=True)
    assert not re.findall(r"\b(MPI_\w+|nccl[A-Z]\w+|cuda[A-Z]\w+|hip[A-Z]\w+)", shown)
