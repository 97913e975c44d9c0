"""The facts about this process and machine from which a backend is chosen.

Nothing is looked for at import. Starting MPI, and loading what costs time, is left to the backends.
"""

from __future__ import annotations

from samestep._util import launchers
from samestep.gpu import discovery
from samestep.world.choice import Facts


def gather(*, probe_mpi: bool, cuda: bool = True, hip: bool = True) -> Facts:
    """The facts that `choose` decides by.

    Args:
      probe_mpi: load the MPI library that mpi4py uses (tens of milliseconds). MPI is not started. Without it
        MPI counts as not loadable.
      cuda, hip: whether to ask for such devices. Asking initialises the driver in this process.
    """
    started_by = launchers.launcher()
    facts = Facts(launcher=started_by.name, launcher_size=started_by.size, mpi_detail="not looked for")
    facts.can_meet = launchers.can_meet(started_by)
    if probe_mpi:
        from samestep._util import mpi_library

        library = mpi_library.load()
        facts.mpi_loadable, facts.mpi_detail = bool(library.path), library.problem or library.detail
    asked = [discovery.cuda_devices] * cuda + [discovery.hip_devices] * hip
    found = sorted((devices() for devices in asked), key=lambda devices: -devices.count)
    best = facts.found = found[0] if found else None
    facts.devices = best.count if best else 0
    facts.device_detail = (
        best.detail
        if best and best.count
        else "; ".join(devices.detail for devices in found) or "not looked for"
    )
    facts.every_rank_has_device = facts.devices > 0 and started_by.size == 1
    if best:
        nccl = discovery.communication_library(best.kind, may_open=best.count > 0)
        facts.nccl_loadable, facts.nccl_detail = bool(nccl.path), nccl.detail
    return facts
