"""Division of the data among ranks."""

from samestep.data.container import DistributedDataContainer
from samestep.data.sampler import DistributedSampler
from samestep.data.steps import Shard

__all__ = ["DistributedDataContainer", "DistributedSampler", "Shard"]
