"""samestep under torchft, which makes a new group for each quorum of replicas."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from samestep.torch.process_group import ProcessGroup

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as error:
    raise ImportError(f"samestep.torchft needs torchft: pip install 'samestep[torchft]' ({error})") from error

__all__ = ["ProcessGroupSamestep"]


class ProcessGroupSamestep(ProcessGroupWrapper):  # type: ignore[misc,unused-ignore]
    """What `torchft.Manager` takes as `pg`: a group of samestep, made anew at each quorum. For tensors in host memory.

    Takes the place of `torchft.ProcessGroupGloo`. Each replica is a process of its own. If one dies, the operations of
    the others that need it raise a `PeerLostError` that names its rank in the quorum, and torchft discards the step.
    The next `configure` makes a group of the replicas that are left or have been restarted; what the old group held is
    freed once all its other ranks have left it or ended.

    Args:
      timeout: for all members to meet, and for each operation.

    Raises:
      TimeoutError: by `configure`, names the ranks that have not arrived, and by `wait` of an operation, those that
        are late.
      PeerLostError: by `wait`, a rank of the quorum has ended, or has left the group for a new one. Both are also a
        `torch.distributed.DistBackendError`; see `samestep.torch`.

    Example:
      >>> import datetime, torch.distributed as dist
      >>> from samestep.torchft import ProcessGroupSamestep
      >>> group = ProcessGroupSamestep(timeout=datetime.timedelta(seconds=30))
      >>> store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
      >>> group.configure(f"127.0.0.1:{store.port}/quorum/1", "replica_0", rank=0, world_size=1)
      >>> group.size()
      1
      >>> group.shutdown()

      In a training script, `Manager(pg=group, ...)` does what `configure` does here.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        options = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=self._timeout,
            global_ranks_in_group=[],
            group_id="torchft",
        )
        quorum = "" if self._quorum_id is None else f" of quorum {self._quorum_id}"
        return ProcessGroup(options, name=f"torchft{quorum}")

    def set_timeout(self, timeout: timedelta) -> None:
        """Of later groups, and of operations of this one that are started from now on."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group without waiting for the others, which get an error in operations that need this rank."""
        self.abort(errored=False)

    def getBackendName(self) -> str:
        """As torchft names its own: `torchft-samestep`."""
        return "torchft-samestep"
