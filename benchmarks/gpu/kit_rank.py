"""What every part of the kit shares: the rank's place in it, its backend, and how it tells what it has found."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import samestep as ss

SKIPPED = 77  # exit code of a part that cannot run here, as in automake
RANK = int(os.environ.get("KIT_RANK", "0"))
SIZE = int(os.environ.get("KIT_SIZE", "1"))
SHORT = os.environ.get("KIT_SHORT") == "1"  # to try the kit itself

if ahead := os.environ.pop("KIT_AHEAD", ""):  # another part still runs, and this one's turn is to come
    with contextlib.suppress(Exception):  # the part itself says what is missing
        __import__(ahead)
    sys.stdin.read()


def tell(**what: Any) -> None:
    """A result, as a line for the driver."""
    print("RESULT " + json.dumps({"rank": RANK, **what}), flush=True)


def skip(reason: str) -> None:
    """End this part: something is missing here."""
    print("SKIPPED " + reason, flush=True)
    sys.exit(SKIPPED)


def need(module: str) -> Any:
    """A module, or the end of this part."""
    try:
        return __import__(module)
    except Exception as error:  # broken installations fail in any manner
        skip(f"{module} cannot be imported: {error}")


def start(kind: str, name: str = "world", timeout: float = 60.0, **more: Any) -> Any:
    """The ranks of this part, that meet in a file of their own."""
    method = f"file://{os.environ['KIT_PLACE']}/{name}"
    return ss.initialize(kind, init_method=method, rank=RANK, world_size=SIZE, timeout=timeout, **more)


def turns(full: int, short: int) -> int:
    return short if SHORT else full
