"""What `import torch` leaves behind, as JSON; and what a program changes that asks for "samestep".

`import_torch.py [ask]`
"""

import json
import sys

import torch.distributed as dist

if "ask" in sys.argv:
    dist.Backend("samestep")
handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
found = {
    "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "handlers": {scheme: handler.__module__ for scheme, handler in handlers.items()},
    "modules": sorted(sys.modules),
    "known": "samestep" in dist.Backend.backend_list,
    "init": dist.init_process_group.__module__,
}
print(json.dumps(found))
