"""Start the ranks of a job from a script, as `torch.multiprocessing.spawn` does.

import samestep.multiprocessing as mp


def main(rank, world_size):
    dist.init_process_group("gloo", "tcp://127.0.0.1:29500", rank=rank, world_size=world_size)
    ...


if __name__ == "__main__":
    mp.spawn(main, args=(4,), nprocs=4)
"""

from samestep.multiprocessing.context import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
)
from samestep.multiprocessing.spawning import spawn

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "spawn",
]
