"""`ssh` of a lab: `ssh.py socket [options] host command`.

Asks the thread of the lab behind `socket` to run the command in the host, and exits with the exit code of it.
"""

import socket
import sys

path, *words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[2 if words[0][1:] in "bceFilmoOpw" else 1 :]
with socket.socket(socket.AF_UNIX) as link:
    link.connect(path)
    socket.send_fds(link, [b"+"], [0, 1, 2])
    link.sendall("\0".join([words[0].rpartition("@")[2], " ".join(words[1:])]).encode() + b"\n")
    sys.exit(int(link.makefile().readline() or 255))
