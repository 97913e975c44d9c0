"""Broadcast an object: rank 0 reads a configuration, a vocabulary or a name, and all ranks get it.

samestep run -n 2 examples/recipes/broadcast_object.py
"""

import json
from pathlib import Path

import numpy as np
import samestep as ss

CONFIG = Path("config.json")

with ss.initialize() as backend:
    if backend.rank == 0:
        CONFIG.write_text(json.dumps({"rate": 0.1, "layers": [64, 10], "name": "digits"}))
    config = backend.bcast_object(json.loads(CONFIG.read_text()) if backend.rank == 0 else None)
    assert config["layers"] == [64, 10]

    names = backend.allgather_object(f"{config['name']} of rank {backend.rank}")  # one object of each rank
    assert len(names) == backend.size

    table = np.arange(6.0) if backend.rank == 0 else np.empty(6)
    table = backend.bcast(table)  # an array goes as it is: faster, and nothing is unpickled
    assert table[5] == 5
    if backend.rank == 0:
        print(f"{config['name']}: rate {config['rate']} on {len(names)} ranks")
