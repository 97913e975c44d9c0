"""Which of the visible devices a rank uses. Pure."""

from __future__ import annotations

from samestep.errors import InvalidArgumentError, UnavailableError


def assign_device(  # noqa: PLR0917 - as `initialize` has found them
    kind_name: str,
    request: list[int] | str | None,
    local_rank: int,
    local_size: int,
    n_visible: int,
    looked_for: str = "",
) -> int | None:
    """The device of this rank, as an index among the *visible* devices, or None.

    With one visible device per process (a launcher that sets a mask with one entry for each rank) that is 0.

    Args:
      kind_name: "cuda" or "amdgpu", for error texts.
      request: of the user. None: `local_rank` mod `n_visible`, and None without a device; "missing": None; a list: its
        entry for `local_rank`.
      local_rank, local_size: among the ranks of this host.
      n_visible: devices that this process sees.
      looked_for: where there are none, for the error text.

    Raises:
      InvalidArgumentError: a list shorter than `local_size`, or an entry below 0.
      UnavailableError: a list, and `n_visible` is 0, or the entry of any rank of this host is not below it: then all
        ranks raise, and none waits for another.

    Example:
      >>> [assign_device("cuda", None, rank, 3, 2) for rank in range(3)]
      [0, 1, 0]
    """
    if isinstance(request, str):
        return None
    if request is None:
        # More ranks than devices share them. Without a device the rank works on the host.
        return local_rank % n_visible if n_visible > 0 else None
    _check_list(kind_name, request, local_size, n_visible, looked_for)
    return request[local_rank]


def _check_list(kind_name: str, devices: list[int], local_size: int, n_visible: int, looked_for: str) -> None:
    """Raise unless each rank of this host can use its entry: so that all of them raise."""
    if len(devices) < local_size:
        raise InvalidArgumentError(
            f"{kind_name}_devices has {len(devices)} entries, but this host has {local_size} ranks: give one device "
            "for each node-local rank"
        )
    for i, device in enumerate(devices):
        if device < 0:
            raise InvalidArgumentError(f"{kind_name}_devices[{i}] is {device}: devices are numbered from 0")
    if n_visible == 0:
        raise UnavailableError(
            f"{kind_name}_devices were given, but this process sees no {kind_name} device: {looked_for}. Cure: leave "
            f"{kind_name}_devices out to run without one"
        )
    for i, device in enumerate(devices[:local_size]):
        if device >= n_visible:
            raise UnavailableError(
                f"{kind_name}_devices[{i}] is {device}, but this process sees {n_visible} {kind_name} "
                f"device{'s' * (n_visible != 1)}, numbered from 0. A mask such as CUDA_VISIBLE_DEVICES hides devices "
                "and numbers the others anew; where the launcher gives each rank a device of its own, leave "
                f"{kind_name}_devices out"
            )
