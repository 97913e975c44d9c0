"""`samestep bench allreduce` with two sizes and one round; its picture is the file a.svg."""

import sys
from pathlib import Path

from samestep.bench import ranks

ranks._SIZES, ranks._BURST, ranks._ROUNDS = (8, 1024), 1e-4, 1
sys.exit(ranks.main("allreduce", Path("a.svg")))
