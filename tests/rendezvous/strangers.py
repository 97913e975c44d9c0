"""Strangers: processes of another user of this host, and clients that say what they should not."""

import json
import os
import socket
import struct
import warnings

import pytest
from samestep._util import handshake

NOBODY = 65534
NESTED = b"[" * 200_000

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(act):
    """What `act` returned in a process of another user, or the text of what it raised; a JSON value."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # JAX warns of a fork where another test has imported it
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                result = act()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps(result).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return json.loads(result)


def raw_client(port, secret=b"", protocol=handshake.STORE):
    """A connection that has proved itself, if `secret` is what the server wants."""
    link = socket.create_connection(("127.0.0.1", port), timeout=30)
    handshake.greet(link, handshake.Client(protocol, secret))
    return link


def frame(payload, kind=b"Q"):
    return struct.pack("!cI", kind, len(payload)) + payload


def is_closed(link):
    """Whether the other side ends the connection, after whatever it may answer."""
    try:
        while link.recv(1 << 16):
            continue
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


class Stranger:
    """A process that acts beside this one until the end of the block: `act(receive, tell)`, with lines of JSON.

    Args:
      act: what it does; `receive` waits for the next `say`, and returns None at the end.
      user: whom it runs as; None for this user.
    """

    def __init__(self, act, user=NOBODY):
        (child_in, self._to), (self._from, child_out) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._to)
                os.close(self._from)
                if user is not None:
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                inbox = os.fdopen(child_in)
                act(
                    lambda: json.loads(inbox.readline() or "null"),
                    lambda value: os.write(child_out, json.dumps(value).encode() + b"\n"),
                )
            finally:
                os._exit(0)
        os.close(child_in)
        os.close(child_out)
        self._heard = os.fdopen(self._from)

    def say(self, value):
        os.write(self._to, json.dumps(value).encode() + b"\n")

    def receive(self):
        return json.loads(self._heard.readline() or "null")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._to)
        self._heard.close()
        os.waitpid(self._pid, 0)
