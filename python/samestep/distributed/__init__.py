"""torch.distributed of 2019 on arrays of any library, without torch.

import samestep.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(gradients)
gradients /= dist.get_world_size()

Each function checks its arguments and calls the one `samestep.Backend` of the process.
"""

from samestep.distributed.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    irecv,
    isend,
    recv,
    reduce,
    scatter,
    send,
)
from samestep.distributed.groups import (
    Backend,
    GroupMember,
    ReduceOp,
    get_backend,
    get_rank,
    get_world_size,
    group,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    new_group,
    reduce_op,
)
from samestep.distributed.lists import (
    all_gather_multigpu,
    all_reduce_multigpu,
    broadcast_multigpu,
    reduce_multigpu,
)
from samestep.distributed.process_group import destroy_process_group, init_process_group
from samestep.distributed.requests import Request
from samestep.rendezvous import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    register_rendezvous_handler,
)

__all__ = [
    "Backend",
    "FileStore",
    "GroupMember",
    "HashStore",
    "PrefixStore",
    "ReduceOp",
    "Request",
    "Store",
    "TCPStore",
    "all_gather",
    "all_gather_multigpu",
    "all_reduce",
    "all_reduce_multigpu",
    "barrier",
    "broadcast",
    "broadcast_multigpu",
    "destroy_process_group",
    "gather",
    "get_backend",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "isend",
    "new_group",
    "recv",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "register_rendezvous_handler",
    "scatter",
    "send",
]
