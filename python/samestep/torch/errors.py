"""Errors that are both samestep's and what scripts for torch.distributed catch."""

from __future__ import annotations

import torch.distributed as dist

from samestep import errors


class TimeoutError(errors.TimeoutError, dist.DistBackendError):
    """A deadline has passed; `samestep.TimeoutError` and `torch.distributed.DistBackendError`."""


class PeerLostError(errors.PeerLostError, dist.DistBackendError):
    """A peer has ended; `samestep.PeerLostError` and `torch.distributed.DistBackendError`."""


class MismatchError(errors.MismatchError, dist.DistBackendError):
    """Ranks disagree; `samestep.MismatchError` and `torch.distributed.DistBackendError`."""


class InvalidArgumentError(errors.InvalidArgumentError, dist.DistBackendError):
    """Arguments that do not fit; `samestep.InvalidArgumentError` and `torch.distributed.DistBackendError`."""


_ALSO_TORCH: dict[type, type[Exception]] = {
    kind.__bases__[0]: kind for kind in (TimeoutError, PeerLostError, MismatchError, InvalidArgumentError)
}


def for_torch(error: Exception) -> Exception:
    """The same error, also as a `DistBackendError` if torch would raise one.

    Example:
      >>> isinstance(for_torch(errors.PeerLostError("rank 1 has ended")), RuntimeError)
      True
    """
    kind = next((_ALSO_TORCH[c] for c in type(error).__mro__ if c in _ALSO_TORCH), None)
    if kind is None:
        return error
    text = str(error)
    if kind is TimeoutError:  # the word that scripts for torch search for, and the remedy
        text += "; the timeout of init_process_group, or new_group, may be too short"
    made = kind(text)
    made.__dict__.update(error.__dict__)  # which ranks
    return made.with_traceback(error.__traceback__)
