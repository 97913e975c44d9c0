"""The environment variables of samestep: names, types, defaults and meaning.

No other file spells a name in code, and `get` reads all of them. `docs/launching.md` contains the output of
`markdown()`. The module imports only the standard library, because the agents of `samestep run` need it.
`_util.unknown_settings` warns of misspelt names.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from samestep.errors import InvalidArgumentError

PREFIX = "SAMESTEP_"
VERSION = "0.1.0"
"""Of the package. All ranks have the same, as they have the same settings."""

ALGORITHM = "SAMESTEP_ALGORITHM"
CUDART_LIBRARY = "SAMESTEP_CUDART_LIBRARY"
ENCRYPT = "SAMESTEP_ENCRYPT"
ERROR_FILE = "SAMESTEP_ERROR_FILE"
GPU_AWARE_MPI = "SAMESTEP_GPU_AWARE_MPI"
HEARTBEAT = "SAMESTEP_HEARTBEAT"
HIP_LIBRARY = "SAMESTEP_HIP_LIBRARY"
HOST_ID = "SAMESTEP_HOST_ID"
ISA = "SAMESTEP_ISA"
LAUNCH = "SAMESTEP_LAUNCH"
LAUNCHER = "SAMESTEP_LAUNCHER"
MEMBERSHIP = "SAMESTEP_MEMBERSHIP"
MPI_MAX_MESSAGE = "SAMESTEP_MPI_MAX_MESSAGE"
MPI_TRANSPORT = "SAMESTEP_MPI_TRANSPORT"
NATIVE_TRANSPORT = "SAMESTEP_NATIVE_TRANSPORT"
NCCL_LIBRARY = "SAMESTEP_NCCL_LIBRARY"
REPLACE_GLOO = "SAMESTEP_REPLACE_GLOO"
RANK_PROCESS = "SAMESTEP_RANK_PROCESS"
RECORD = "SAMESTEP_RECORD"
REPORTED = "SAMESTEP_REPORTED"
RESTART_COUNT = "SAMESTEP_RESTART_COUNT"
SECRET = "SAMESTEP_SECRET"
SEGMENT_BYTES = "SAMESTEP_SEGMENT_BYTES"
SHARED_LIMIT = "SAMESTEP_SHARED_LIMIT"
SOCKET_IFNAME = "SAMESTEP_SOCKET_IFNAME"
STAGING_BYTES = "SAMESTEP_STAGING_BYTES"
TIMEOUT = "SAMESTEP_TIMEOUT"
TRUST_NETWORK = "SAMESTEP_TRUST_NETWORK"
UID = "SAMESTEP_UID"
VERIFY = "SAMESTEP_VERIFY"
WARN_AFTER = "SAMESTEP_WARN_AFTER"

TRANSPORTS = {"mpi": MPI_TRANSPORT, "native": NATIVE_TRANSPORT}
"""Of each backend, the variable that requests a transport."""


class Setting(NamedTuple):
    """One environment variable."""

    type: str
    '"bytes", "seconds", "number", "file", "folder", "text", or the words that it may be, the '
    "default first."
    default: str
    """What applies if the variable is not set, in the words of the page; "" = nothing."""
    meaning: str
    """For the page, in Markdown."""
    must_agree: tuple[str, ...] = ()
    """Where all ranks need the same value: groups of "mpi", of "native", with "devices"."""
    zero_is_unset: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The values that it may have; empty if any is allowed."""
        return tuple(self.type.split("|")) if "|" in self.type else ()


_ALL = ("mpi", "native")
SETTINGS = {
    TIMEOUT: Setting("seconds", "600", "after which a wait ends with an error"),
    WARN_AFTER: Setting(
        "seconds", "30", "after which a wait warns, once, and names the ranks that are missing"
    ),
    HEARTBEAT: Setting(
        "seconds",
        "8",
        "2 to 3600: how long another host may be silent until its ranks are given up; on a network whose packets get "
        "lost at times, choose no less than the default",
    ),
    HOST_ID: Setting(
        "text",
        "",
        "divides the ranks of one machine into hosts: ranks with different values count as ranks of "
        "different hosts",
    ),
    MPI_TRANSPORT: Setting(
        "auto|shm|hierarchical|mpi",
        "auto",
        "how ranks communicate under MPI: `shm` through shared memory, `hierarchical` through shared memory within "
        "hosts and MPI between them, `mpi` through MPI; `auto` is `shm` on one host, `hierarchical` on several hosts "
        "if one of them has several ranks, else `mpi`",
        ("mpi",),
    ),
    NATIVE_TRANSPORT: Setting(
        "auto|shm|hierarchical|tcp", "auto", "the same without MPI, with `tcp` in place of `mpi`", ("native",)
    ),
    ALGORITHM: Setting(
        "auto|two_shot|recursive_halving|recursive_doubling",
        "auto",
        "the algorithm that reduces long buffers between ranks or hosts over MPI or TCP; `auto` selects [the "
        "cheapest](scaling.md) for their number and the bytes",
        _ALL,
    ),
    SEGMENT_BYTES: Setting(
        "bytes",
        "by the number of ranks",
        "each rank's part of a segment of a long reduction",
        _ALL,
        zero_is_unset=True,
    ),
    MPI_MAX_MESSAGE: Setting(
        "bytes", "2^30", "the longest message given to MPI", ("mpi",), zero_is_unset=True
    ),
    GPU_AWARE_MPI: Setting(
        "0|1|auto",
        "0",
        "whether device arrays that are only moved are passed to MPI, see [GPUs](gpus.md#gpu-aware-mpi)",
        ("mpi",),
    ),
    STAGING_BYTES: Setting(
        "bytes",
        "4 MiB",
        "how much of a device array is staged through the host at a time, at most",
        ("devices",),
        zero_is_unset=True,
    ),
    ISA: Setting(
        "portable|avx2|avx512", "the fastest", "the instruction set of the reductions; the bits are the same"
    ),
    SHARED_LIMIT: Setting(
        "bytes",
        "half of the memory, split among the ranks of the host",
        "the most shared memory that a rank takes with `shared_arrays=True`; NumPy arrays beyond it are not shared",
    ),
    VERIFY: Setting(
        "number",
        "0",
        "the number of steps after which `DistributedOptimizer`, and `DistributedDataParallel` over samestep, compare "
        "parameters and state between ranks, see [the same step](same-step.md#comparing-ranks); 0: never",
    ),
    SECRET: Setting(
        "text",
        "",
        "without MPI, only processes with the same value may join; `samestep run` sets a random one, with "
        "`--nnodes` [that of a file](#several-hosts)",
    ),
    TRUST_NETWORK: Setting(
        "0|1",
        "0",
        "`1` on all ranks: they accept objects from other hosts although they have no secret; see "
        "[security](security.md)",
    ),
    ENCRYPT: Setting(
        "0|1",
        "0",
        "`1`: all that ranks send each other over TCP is encrypted and authenticated; needs `SAMESTEP_SECRET` and "
        "OpenSSL's libcrypto, see [security](security.md#encryption)",
        _ALL,
    ),
    SOCKET_IFNAME: Setting(
        "text",
        "the one that leads to rank 0",
        "the network interfaces to use, separated by commas; each must exist, and the first with an "
        "address is used. NCCL gets them, too, unless `NCCL_SOCKET_IFNAME` is set. If it is unset, samestep "
        "itself uses those in `GLOO_SOCKET_IFNAME`",
    ),
    CUDART_LIBRARY: Setting("file", "searched", "the CUDA runtime"),
    HIP_LIBRARY: Setting("file", "searched", "the HIP runtime"),
    NCCL_LIBRARY: Setting("file", "searched", "NCCL or RCCL"),
    REPLACE_GLOO: Setting(
        "0|1",
        "0",
        '`1`: `init_process_group("gloo")` and `new_group(backend="gloo")` start this backend, see [DDP](ddp.md)',
    ),
    ERROR_FILE: Setting(
        "file", "", "set by `samestep run`: the file into which a rank writes the exception that ended it"
    ),
    RESTART_COUNT: Setting(
        "number", "", "set by `samestep run`: how often it has restarted the ranks, see `--max-restarts`"
    ),
    LAUNCH: Setting("text", "", "set by `samestep run`: where the launcher listens"),
    MEMBERSHIP: Setting(
        "text",
        "",
        "set by `samestep run --min-ranks`: where the store is that says which ranks make the group",
    ),
    UID: Setting("text", "", "set by `samestep run --min-ranks`: rank and life of this process, as 2.0"),
    LAUNCHER: Setting(
        "text",
        "",
        "set by `samestep run`, `samestep.launch`, `samestep.dask` and `samestep.ray`: which of them has set `RANK`",
    ),
    RANK_PROCESS: Setting(
        "text",
        "",
        "set by `initialize`: the process of this rank, so that no program that it starts takes its place",
    ),
    RECORD: Setting(
        "folder", "", "set by `samestep same`: the folder in which rank 0 records the hashes of all means"
    ),
    REPORTED: Setting("text", "", "set by `samestep run`: the unknown names that it has warned about"),
}
"""Name -> what it is. In the order of the page."""

OF_TESTS = ("SAMESTEP_TEST_JOB", "SAMESTEP_TEST_LAYOUT", "SAMESTEP_TEST_RUN")


def get(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """The text of a variable; None: it is not set.

    Example:
      >>> get("SAMESTEP_ISA", {"SAMESTEP_ISA": "avx2"}), get("SAMESTEP_ISA", {})
      ('avx2', None)
    """
    assert name in SETTINGS
    return env.get(name)


def set_here(name: str, text: str | None) -> None:
    """Sets a variable of this process; None: removes it."""
    assert name in SETTINGS
    if text is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = text


@functools.cache
def must_agree(where: str) -> tuple[str, ...]:
    """The variables that must agree on all ranks in groups of "mpi" or "native", or with "devices".

    Example:
      >>> must_agree("native")
      ('SAMESTEP_NATIVE_TRANSPORT', 'SAMESTEP_ALGORITHM', 'SAMESTEP_SEGMENT_BYTES', 'SAMESTEP_ENCRYPT')
    """
    return tuple(name for name, setting in SETTINGS.items() if where in setting.must_agree)


def read(name: str, env: Mapping[str, str] = os.environ) -> str:
    """What a variable of words or bytes says here; see `parse`."""
    return parse(name, get(name, env))


def parse(name: str, text: str | None) -> str:
    """What `text` means for a variable of words or bytes; None: it is not set.

    Raises:
      InvalidArgumentError: it means nothing.

    Example:
      >>> parse("SAMESTEP_MPI_MAX_MESSAGE", "01000"), parse("SAMESTEP_ALGORITHM", None)
      ('1000', 'auto')
    """
    setting = SETTINGS[name]
    if words := setting.words:
        if text is None or text in words:
            return words[0] if text is None else text
        raise InvalidArgumentError(f"{name} must be {', '.join(words[:-1])} or {words[-1]}, got {text!r}")
    if text is None:
        return ""
    if text.isascii() and text.isdigit():
        return "" if setting.zero_is_unset and int(text) == 0 else str(int(text))
    raise InvalidArgumentError(f"{name} must be a number of bytes, got {text!r}")


def markdown() -> str:
    """The table of the page on launching."""
    rows = ["| variable | type | default | same on all ranks | meaning |", "|---|---|---|---|---|"]
    for name, setting in SETTINGS.items():
        words = ", ".join(f"`{word}`" for word in setting.words)
        agree = {(): "", _ALL: "yes", ("devices",): "with device arrays"}.get(setting.must_agree, "yes")
        rows.append(
            f"| `{name}` | {words or setting.type} | {setting.default or '-'} | {agree} | {setting.meaning} |"
        )
    return "\n".join(rows) + "\n"
