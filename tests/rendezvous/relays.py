"""A relay: listens at one address, and forwards what it hears to another, but for what it is told to add."""

import contextlib
import socket
import threading

from samestep._util import handshake


class Relay:
    """Forwards one connection's handshake, then what `to_client` and `to_server` are, and then the rest.

    Attributes:
      place: where it listens.
      heard: all that both ends have said.
    """

    def __init__(self, target, *, host="127.0.0.1", port=0, to_client=b"", to_server=b""):
        self._target, self._adds = target, (to_client, to_server)
        self._listener = socket.create_server((host, port))
        self.place = self._listener.getsockname()
        self.heard = b""
        self._links = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for link in (self._listener, *self._links):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, socket.create_connection(self._target) as server:
                    self._links = [client, server]
                    self._forward(client, server)

    def _forward(self, client, server):
        to_client, to_server = self._adds
        with contextlib.suppress(OSError):
            self._pass(client, server, len(handshake.AGENT) + 16)
            self._pass(server, client, handshake.ANSWER_NBYTES)
            self._pass(client, server, 32)
            client.sendall(to_client)
            server.sendall(to_server)
            back = threading.Thread(target=self._pump, args=(server, client))
            back.start()
            self._pump(client, server)
            back.join()

    def _pass(self, source, target, nbytes):
        """Forwards so many bytes; both ends are told of the end of one."""
        while nbytes:
            data = source.recv(min(nbytes, 1 << 16))
            if not data:
                target.shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
            self.heard += data
            target.sendall(data)
            nbytes -= len(data)

    def _pump(self, source, target):
        with contextlib.suppress(OSError):
            self._pass(source, target, 1 << 62)
