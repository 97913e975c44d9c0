"""Starts the ranks of native_ranks.py: imports NumPy and samestep once, and forks a process for each rank.

Arguments: the ranks as JSON, each [descriptor for all it writes, its variables], and the program. Writes a line of JSON
for each rank, [rank, pid], and one when it has ended, [rank, exit code].
"""

import json
import os
import runpy
import sys

import numpy as np  # noqa: F401 - here and not in each rank
import samestep.world.bootstrap_native  # noqa: F401


def become_rank(fd, variables, fds, argv):
    os.setsid()  # so that its children can be ended with it
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    for other in fds:
        os.close(other)
    os.environ.update(variables)
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(argv[0])


def main():
    ranks, argv = json.loads(sys.argv[1]), sys.argv[2:]
    fds, pids = [fd for fd, _ in ranks], {}
    for rank, (fd, variables) in enumerate(ranks):
        pid = os.fork()
        if pid == 0:
            become_rank(fd, variables, fds, argv)
            return
        pids[pid] = rank
        print(json.dumps([rank, pid]), flush=True)
    for fd in fds:
        os.close(fd)
    while pids:
        pid, status = os.wait()
        print(json.dumps([pids.pop(pid), os.waitstatus_to_exitcode(status)]), flush=True)
    sys.exit()


if __name__ == "__main__":
    main()
    runpy.run_path(sys.argv[0], run_name="__main__")
