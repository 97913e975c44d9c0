"""An attack by way of an address that two hosts have, as those of bridges for containers are.

    bridge.py listen FOLDER ADDRESS TARGET FILE  on the second host: forwards agents to their launcher, orders `touch`
    bridge.py tell FOLDER COMMAND...             on the launcher's host: tells its port, then runs the command

Both meet at pipes in a folder.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "rendezvous"))


def listen(folder, address, target, file):
    from relays import Relay
    from samestep._util.frames import Channel
    from samestep.launch import frames

    port = int(Path(folder, "port").read_text())
    order = {"argv": ["touch", file], "env": {}, "cwd": "/", "stdin": "", "live": []}
    added = Channel(most=1 << 20).seal(frames.START, order)
    with Relay((target, port), host=address, port=port, to_client=added) as relay:
        Path(folder, "ready").write_text("x")
        sys.stdin.read()  # until the test ends
    print("asked" if relay.heard else "not asked")


def tell(folder, *command):
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (port,) = (int(line[1].partition(":")[2], 16) for line in lines if line[3] == "0A")  # listens
    Path(folder, "port").write_text(str(port))
    Path(folder, "ready").read_text()
    os.execvp(command[0], command)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
