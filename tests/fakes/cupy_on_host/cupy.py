"""As much of CuPy as examples/digits_cupy.py uses, on NumPy: its arithmetic without a device. For tests only."""

from numpy import *  # noqa: F403
from numpy import asarray as asnumpy  # noqa: F401
