"""torch.distributed of 2019 on arrays of any library, without torch.

import samestep.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(gradients)
gradients /= dist.get_world_size()

Each function checks its arguments and calls the one `samestep.Backend` of the process.
"""

from samestep.distributed import collectives, groups, lists, process_group, requests
from samestep.distributed.collectives import *
from samestep.distributed.groups import *
from samestep.distributed.lists import *
from samestep.distributed.process_group import *
from samestep.distributed.requests import *
from samestep.rendezvous import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    register_rendezvous_handler,
)

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "register_rendezvous_handler"]
__all__ += collectives.__all__
__all__ += groups.__all__
__all__ += lists.__all__
__all__ += process_group.__all__
__all__ += requests.__all__
