"""Whether ranks accept objects from each other: only if they have proved that they belong to one job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from samestep import _settings
from samestep.errors import InvalidArgumentError, UnavailableError

VARIABLE = _settings.TRUST_NETWORK
_CURE = (
    "give all ranks one secret, as by `export SAMESTEP_SECRET=$(openssl rand -hex 16)` before the launcher, or start "
    f"them with `samestep run --hosts`; or set {VARIABLE}=1 on all ranks, in a network that only you can reach"
)


def trusts(proved: bool, env: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank takes objects from the others.

    Args:
      proved: they have proved that they belong to this job, or run as this user on this host.

    Raises:
      InvalidArgumentError: the variable says neither 0 nor 1.

    Example:
      >>> trusts(False, {}), trusts(True, {}), trusts(False, {"SAMESTEP_TRUST_NETWORK": "1"})
      (False, True, True)
    """
    said = _settings.get(VARIABLE, env) or "0"
    if said not in ("0", "1"):
        raise InvalidArgumentError(f"{VARIABLE} must be 0 or 1, got {said!r}")
    return proved or said == "1"


def warning() -> str:
    """The warning of rank 0 at the start of a world of several hosts without a secret."""
    return (
        "the ranks have met over the network without a secret: a process that reaches their ports can pose as a "
        f"rank and send wrong numbers, so objects are refused; {_CURE} (docs/security.md)"
    )


def refuse_objects(verb: str) -> UnavailableError:
    """The error of a verb on objects in such a world; the same on all ranks."""
    return UnavailableError(
        f"{verb}: objects travel by pickle, which can run code, and the ranks have met without a secret; {_CURE}"
    )
