"""Hears all that passes an interface, until its input ends: listener.py INTERFACE. Prints it in hexadecimal."""

import contextlib
import select
import socket
import sys

_ALL = 0x0003  # ETH_P_ALL
_SO_RCVBUFFORCE = 33

heard = bytearray()
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as packets:
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    packets.bind((sys.argv[1], 0))
    print("ready", flush=True)
    while sys.stdin not in select.select([packets, sys.stdin], [], [])[0]:
        heard += packets.recv(1 << 17)
    packets.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            heard += packets.recv(1 << 17)
print(heard.hex())
