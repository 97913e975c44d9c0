"""Division of the data among ranks."""

from samestep.data.rows import DistributedDataContainer
from samestep.data.sampler import DistributedSampler, Shard

__all__ = ["DistributedDataContainer", "DistributedSampler", "Shard"]
