"""Arrays of any library: which objects are arrays, which are writable, and new arrays of the same library."""

from samestep._core import ArrayInfo as ArrayInfo
from samestep.arrays.describe import device_of as device_of
from samestep.arrays.describe import extents as extents
from samestep.arrays.describe import info as info
from samestep.arrays.describe import is_array as is_array
from samestep.arrays.describe import is_float0 as is_float0
from samestep.arrays.describe import order_of as order_of
from samestep.arrays.describe import readable as readable
from samestep.arrays.libraries import converts as converts
from samestep.arrays.libraries import copy as copy
from samestep.arrays.libraries import copy_if_overlapping as copy_if_overlapping
from samestep.arrays.libraries import deliver as deliver
from samestep.arrays.libraries import from_bytes as from_bytes
from samestep.arrays.libraries import like_bytes as like_bytes
from samestep.arrays.libraries import named as named
from samestep.arrays.libraries import of as of
from samestep.arrays.libraries import targets as targets
from samestep.arrays.of_jax import as_received as as_received
from samestep.arrays.of_jax import is_jax as is_jax
from samestep.arrays.of_jax import sharding_of as sharding_of
