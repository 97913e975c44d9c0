"""The frames between agents and their launcher.

From an agent:

* `HELLO` (JSON: host, rank, size), once both ends have proved to know the run's token, see `handshake`; its
  `Channel` proves the origin of all frames, and encrypts all but those of `READABLE`;
* `STARTED` (JSON: pid), `LINES` (whole ones), and where asked for `PARTIAL` (the unfinished one);
* `TAKEN` (JSON: a number): as many bytes of `INPUT` need no more room;
* `CUT_OFF`: `mpirun` ended the agent's stub;
* `EXITED` (JSON: status, time, signals, signalled_at, out_of_memory, error, as in `causes.ProcessExit`): the
  rank ended;
* `DONE`: everything that the rank started is gone, too.

From the launcher: `START` (JSON: argv, env, cwd, stdin, live), `INPUT` (bytes for rank 0, none at the end),
`SIGNAL` (JSON: a number), `LEAVE` (JSON: the exit code of the job, for agents of `samestep run --join`).
"""

from __future__ import annotations

HELLO, STARTED, TAKEN, CUT_OFF, EXITED, DONE = b"H", b"P", b"T", b"M", b"X", b"D"
START, INPUT, SIGNAL, LEAVE = b"S", b"I", b"K", b"L"
LINES, PARTIAL = {1: b"o", 2: b"e"}, {1: b"O", 2: b"E"}  # by the rank's descriptor
READABLE = frozenset([*LINES.values(), *PARTIAL.values()])  # there may be gigabytes of them
