"""An NBD server that breaks the protocol in one way. Usage: nbd_liar.py SOCKET WAY [KEY=VALUE…]

The data are zeroes, or what was written. It prints a line for each connection. Ways that begin with `greet-`, `option-` or
`tls-` fail in the handshake, the others after `after` replies (default 20). `once`: the server is honest after the first
connection that it broke. With `headers=extended`, it speaks the protocol with extended headers. `tls=FOLDER`: over TLS, with
the certificate in that folder; `version=1.2` allows no newer one. `flags=NUMBER`: the transmission flags. `drip=SECONDS`:
TLS is sent in single bytes, with that pause before each.
"""

import os
import socket
import ssl
import struct
import sys
import threading
import time

SIZE = 64 << 20
CHUNK = 1 << 14
OPTION, REPLY = 0x49484156454F5054, 0x3E889045565A9
ACK, INFO, META, UNSUP, TLS = 1, 3, 4, 0x80000001, 0x80000005
FLAGS = 1 | 4 | 8 | 32 | 64 | 256


class Liar:
    def __init__(self, way, options):
        self.way, self.after = way, int(options.get("after", 20))
        self.extended = options.get("headers") == "extended"
        self.once = "once" in options
        self.size = int(options.get("size", SIZE))
        self.flags = int(options.get("flags", FLAGS))
        self.data = bytearray(self.size)
        self.lied = 0
        self.lock = threading.Lock()
        self.drip = options.get("drip")
        self.tls = None
        if "tls" in options:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(f"{options['tls']}/server-cert.pem", f"{options['tls']}/server-key.pem")
            if "version" in options:
                self.tls.maximum_version = {"1.2": ssl.TLSVersion.TLSv1_2}[options["version"]]

    def honest(self):
        return self.once and self.lied > 0

    def serve(self, s):
        try:
            secured = self.shake(s)
            if secured:
                self.transmit(secured)
        except (OSError, EOFError):
            pass
        finally:
            s.close()

    def shake(self, s):
        """Returns the socket after the handshake, or None."""
        if self.way == "greet-hang":
            time.sleep(3600)
        if self.way == "greet-magic":
            s.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return None
        s.sendall(struct.pack(">8sQH", b"NBDMAGIC", OPTION, 3))
        read(s, 4)
        while True:
            magic, option, length = struct.unpack(">QII", read(s, 16))
            read(s, length)

            def reply(kind, data=b"", option=option):
                s.sendall(struct.pack(">QIII", REPLY, option, kind, len(data)) + data)

            if self.way == "option-tls":
                reply(TLS)
            elif self.way == "option-long":
                s.sendall(struct.pack(">QIII", REPLY, option, ACK, 0xFFFFFFFF))
            elif option == 11:
                reply(ACK if self.extended else UNSUP)
            elif option == 8:
                reply(ACK)
            elif option == 10:
                reply(META, struct.pack(">I", 1) + b"base:allocation")
                reply(ACK)
            elif option == 7:
                flags = self.flags | (2 if self.way == "read-only" or self.way == "turns-read-only" and self.lied else 0)
                flags &= ~4 if self.way == "loses-flush" and self.lied else ~0
                size = self.size // 2 if self.way == "shrink" and self.lied else self.size
                reply(INFO, struct.pack(">HQH", 0, size, flags))
                reply(INFO, struct.pack(">HIII", 3, 0 if self.way == "option-blocks" else 1, 4096, 1 << 20))
                reply(ACK)
                return s
            elif option == 5 and self.tls:
                reply(ACK)
                s = self.secure(s)
                if s is None:
                    return None
            else:
                reply(UNSUP)

    def secure(self, s):
        """Does the handshake of TLS. Returns the socket, or None."""
        if self.way == "tls-hang":
            time.sleep(3600)
        elif self.way == "tls-garbage":
            s.sendall(b"\xde\xad\xbe\xef" * 64)
        elif self.way == "tls-cut":
            return None
        elif self.way == "tls-huge":
            # A ServerHello of 16 MiB, in as many records as are taken.
            s.sendall(struct.pack(">BHHI", 22, 0x303, CHUNK, 0x02FFFFFF) + bytes(CHUNK - 4))
            while True:
                s.sendall(struct.pack(">BHH", 22, 0x303, CHUNK) + bytes(CHUNK))
        elif self.way == "tls-inject":
            # As someone between the two, who continues without TLS.
            for option, kind, data in ((11, UNSUP, b""), (8, UNSUP, b""), (7, INFO, struct.pack(">HQH", 0, self.size, FLAGS)), (7, ACK, b"")):
                s.sendall(struct.pack(">QIII", REPLY, option, kind, len(data)) + data)
        else:
            return self.tls.wrap_socket(s if self.drip is None else dripping(s, float(self.drip)), server_side=True)
        drain(s)
        return None

    def chunk(self, kind, cookie, offset, body, done=True):
        if self.extended:
            return struct.pack(">IHHQQQ", 0x6E8A278C, done, kind, cookie, offset, len(body)) + body
        return struct.pack(">IHHQI", 0x668E33EF, done, kind, cookie, len(body)) + body

    def transmit(self, s):
        served = 0
        while self.way == "flood":
            s.sendall(bytes(CHUNK))
        while True:
            if self.extended:
                magic, flags, kind, cookie, offset, length = struct.unpack(">IHHQQQ", read(s, 32))
            else:
                magic, flags, kind, cookie, offset, length = struct.unpack(">IHHQQI", read(s, 28))
            if magic != (0x21E41C71 if self.extended else 0x25609513):
                os._exit(3)
            if kind == 2:
                return
            payload = read(s, length) if kind == 1 else b""
            served += 1
            if served > self.after and not self.honest():
                with self.lock:
                    self.lied += 1
                if self.lie(s, kind, cookie, offset, length):
                    return
            with self.lock:
                if kind == 1:
                    self.data[offset : offset + length] = payload
                elif kind in (4, 6):
                    self.data[offset : offset + length] = bytes(length)
            if kind == 0:
                self.read_reply(s, cookie, offset, length)
            else:
                s.sendall(self.chunk(0, cookie, offset, b""))

    def read_reply(self, s, cookie, offset, length):
        """Three chunks, the last first."""
        data = bytes(self.data[offset : offset + length])
        cut, end = length // 3, length - length // 4
        parts = [(end, data[end:]), (0, data[:cut]), (cut, data[cut:end])]
        for at, part in parts:
            if part.count(0) == len(part):
                s.sendall(self.chunk(2, cookie, offset, struct.pack(">QI", offset + at, len(part)), False))
            else:
                s.sendall(self.chunk(1, cookie, offset, struct.pack(">Q", offset + at) + part, False))
        s.sendall(self.chunk(0, cookie, offset, b""))

    def lie(self, s, kind, cookie, offset, length):
        """Breaks the protocol. Returns whether the connection is to be closed."""
        data = struct.pack(">Q", offset)
        if self.way == "magic":
            s.sendall(b"\xde\xad\xbe\xef" * 16)
        elif self.way == "cookie":
            s.sendall(self.chunk(0, cookie ^ 0x5A5A, offset, b""))
        elif self.way == "long-chunk":
            s.sendall(self.chunk(1, cookie, offset, data + bytes(length + 4096)))
        elif self.way == "absurd-chunk":
            head = self.chunk(1, cookie, offset, b"")
            width = 8 if self.extended else 4
            s.sendall(head[:-width] + b"\xff" * width + data + bytes(4096))
        elif self.way == "beyond":
            s.sendall(self.chunk(1, cookie, offset, struct.pack(">Q", offset + length) + bytes(512)))
        elif self.way == "twice":
            s.sendall(self.chunk(0x8001, cookie, offset, struct.pack(">IH", 5, 0)) * 2)
        elif self.way == "half":
            s.sendall(self.chunk(1, cookie, offset, data + bytes(64))[:30])
            return True
        elif self.way == "hang":
            time.sleep(3600)
        elif self.way in ("close", "shrink", "turns-read-only", "loses-flush"):
            return True
        elif self.way == "notify":
            s.unwrap()
            return True
        elif self.way == "half-close":
            # Of the connection below TLS, without its goodbye.
            os_level(s).shutdown(socket.SHUT_WR)
        elif self.way == "records":
            os_level(s).sendall(b"\xde\xad\xbe\xef" * 64)
        elif self.way == "shutdown":
            s.sendall(self.chunk(0x8001, cookie, offset, struct.pack(">IH", 108, 0)))
        else:
            return False
        drain(os_level(s))
        return True


def os_level(s):
    """The socket below TLS."""
    return socket.socket(fileno=os.dup(s.fileno()))


def drain(s):
    """Reads until the other side closes the connection."""
    s.settimeout(60)
    while s.recv(65536):
        pass


def dripping(s, pause_s):
    """A socket for one that sends in single bytes."""
    inner, outer = socket.socketpair()

    def carry(source, target, bytes_max):
        try:
            while data := source.recv(bytes_max):
                if bytes_max == 1 and pause_s:
                    time.sleep(pause_s)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    for way in ((s, outer, 65536), (outer, s, 1)):
        threading.Thread(target=carry, args=way, daemon=True).start()
    return inner


def read(s, length):
    parts = []
    while length > 0:
        part = s.recv(min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def main():
    path, way, *options = sys.argv[1:]
    server = Liar(way, dict(o.split("=", 1) for o in options))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    while True:
        s, _ = listener.accept()
        print("a connection", flush=True)
        threading.Thread(target=server.serve, args=(s,), daemon=True).start()


main()
