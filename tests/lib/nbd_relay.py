"""A relay to an NBD server, which gives fewer connections than the server offers, and can end one of them."""

import contextlib
import socket
import threading
import time
from pathlib import Path


class Relay:
    """Listens at a UNIX socket, and carries bytes to a server and back. It is used like a server of `nbd_servers.py`.

    `gives`: how many connections it gives at a time; it may be changed. `manner`: what becomes of the others: `close`, or `hold`,
    so that they get no answer. `pause_s`: bytes of the server wait for so long; it may be changed.
    """

    def __init__(self, rig, server, name="relay", gives=100, manner="close"):
        self.name, self.server, self.gives, self.manner, self.pause_s = name, server, gives, manner, 0.0
        self.socket = Path(rig.dir / f"{name}.sock")
        self.lock = threading.Lock()
        self.count = 0
        # Both sockets of each connection that is given, by its number. The first is 1.
        self.given = {}
        self.held = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.socket))
        self.listener.listen(16)
        rig.children.append(self)
        threading.Thread(target=self.accept, daemon=True).start()

    def uri(self, export="", **parameters):
        return self.server.uri(export, **parameters).replace(str(self.server.socket), str(self.socket))

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.take(client)

    def take(self, client):
        with self.lock:
            if len(self.given) < self.gives:
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(str(self.server.socket))
                except OSError:
                    client.close()
                    return
                self.count += 1
                self.given[self.count] = (client, server)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self.carry, args=(self.count, *ends, ends[0] is server), daemon=True).start()
            elif self.manner == "hold":
                self.held.append(client)
            else:
                client.close()

    def carry(self, number, source, target, may_wait):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if may_wait:
                    time.sleep(self.pause_s)
                target.sendall(data)
        self.end(number)

    def end(self, number):
        """Ends a connection."""
        with self.lock:
            pair = self.given.pop(number, ())
        for end in pair:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def numbers(self):
        """The connections that are given."""
        with self.lock:
            return sorted(self.given)

    def kill(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for number in self.numbers():
            self.end(number)
        for client in self.held:
            client.close()
