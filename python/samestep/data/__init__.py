"""Which part of the data each rank works on."""

from samestep.data.container import DistributedDataContainer
from samestep.data.sampler import DistributedSampler

__all__ = ["DistributedDataContainer", "DistributedSampler"]
