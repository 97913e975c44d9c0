"""Arrays of any library: which objects are arrays, which are writable, and new arrays of the same library."""

from samestep._core import ArrayInfo
from samestep.arrays.allocate import (
    copy,
    copy_if_overlapping,
    fill_with_zeros,
    new_array,
    new_in_order,
    new_like,
    orders_axes,
    place_of,
    to_library,
    to_library_of,
)
from samestep.arrays.convert import converts, store_rounded, to_float32
from samestep.arrays.describe import (
    as_received,
    device_of,
    extents,
    info,
    is_array,
    is_float0,
    is_jax,
    library_of,
    order_of,
    readable,
)

__all__ = [
    "ArrayInfo",
    "as_received",
    "converts",
    "copy",
    "copy_if_overlapping",
    "device_of",
    "extents",
    "fill_with_zeros",
    "info",
    "is_array",
    "is_float0",
    "is_jax",
    "library_of",
    "new_array",
    "new_in_order",
    "new_like",
    "order_of",
    "orders_axes",
    "place_of",
    "readable",
    "store_rounded",
    "to_float32",
    "to_library",
    "to_library_of",
]
