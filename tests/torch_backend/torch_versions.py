"""What the versions of torch have."""

import pytest

try:
    from torch import __version__ as version
except ImportError:
    version = "0.0"


def since(major, minor, what):
    """A mark for a test of `what`, which older versions lack."""
    have = tuple(map(int, version.split(".")[:2]))
    return pytest.mark.skipif(have < (major, minor), reason=f"torch {version} has no {what}")


finds_backends = since(2, 5, "search for backends: a program calls samestep.torch.register()")
