"""One step of all ranks: sums over shards whose bits do not depend on the number of ranks, uneven data, metrics."""

from samestep.step.accumulator import Accumulator
from samestep.step.metrics import gather_metrics, metric_mean
from samestep.step.uneven import steps

__all__ = ["Accumulator", "gather_metrics", "metric_mean", "steps"]
