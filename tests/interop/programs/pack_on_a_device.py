"""Prints why an array of a device cannot be packed in a process that has opened no GPU runtime."""

import numpy as np
import samestep as ss
from samestep import _core


class OnDevice:
    __cuda_array_interface__ = {"shape": (1,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012


try:
    _core.pack([OnDevice()], np.empty(4, np.uint8))
except ss.InvalidArgumentError as error:
    print(error)
