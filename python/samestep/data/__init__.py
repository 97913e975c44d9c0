"""Division of the data among ranks."""

from samestep.data.container import DistributedDataContainer
from samestep.data.sampler import DistributedSampler, Shard

__all__ = ["DistributedDataContainer", "DistributedSampler", "Shard"]
