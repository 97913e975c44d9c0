"""Arrays of any library: which objects are arrays, which are writable, and new arrays of the same library."""

from samestep._core import ArrayInfo as ArrayInfo
from samestep.arrays.allocate import copy as copy
from samestep.arrays.allocate import copy_if_overlapping as copy_if_overlapping
from samestep.arrays.allocate import fill_with_zeros as fill_with_zeros
from samestep.arrays.allocate import new_array as new_array
from samestep.arrays.allocate import new_in_order as new_in_order
from samestep.arrays.allocate import new_like as new_like
from samestep.arrays.allocate import orders_axes as orders_axes
from samestep.arrays.allocate import place_of as place_of
from samestep.arrays.allocate import to_library as to_library
from samestep.arrays.allocate import to_library_of as to_library_of
from samestep.arrays.convert import converts as converts
from samestep.arrays.convert import store_rounded as store_rounded
from samestep.arrays.convert import to_float32 as to_float32
from samestep.arrays.describe import as_received as as_received
from samestep.arrays.describe import device_of as device_of
from samestep.arrays.describe import extents as extents
from samestep.arrays.describe import info as info
from samestep.arrays.describe import is_array as is_array
from samestep.arrays.describe import is_float0 as is_float0
from samestep.arrays.describe import is_jax as is_jax
from samestep.arrays.describe import library_of as library_of
from samestep.arrays.describe import order_of as order_of
from samestep.arrays.describe import readable as readable
