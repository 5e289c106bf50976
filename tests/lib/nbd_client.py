"""An NBD client for tests, which also sends what no client should. It needs Python's standard library only."""

import os
import socket
import ssl
import struct

OPTION = 0x49484156454F5054
REPLY = 0x0003E889045565A9
REQUEST, WIDE_REQUEST = 0x25609513, 0x21E41C71
SIMPLE, CHUNK, WIDE_CHUNK = 0x67446698, 0x668E33EF, 0x6E8A278C
EXPORT_NAME, ABORT, LIST, TLS, INFO, GO = 1, 2, 3, 5, 6, 7
STRUCTURED, LIST_META, SET_META, EXTENDED = 8, 9, 10, 11
ACK = 1
POLICY, INVALID, TLS_REQUIRED = ((1 << 31) + number for number in (2, 3, 5))
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZERO, STATUS = 0, 1, 2, 3, 4, 5, 6, 7
FUA, NO_HOLE, DF, REQ_ONE, PAYLOAD = 1, 2, 4, 8, 32
EPERM, EIO, EINVAL, ENOSPC = 1, 5, 22, 28
ALLOCATION, DEPTH = "base:allocation", "qemu:allocation-depth"


class Gone(Exception):
    """The server has closed the connection."""


def text(name):
    data = name.encode()
    return struct.pack(">I", len(data)) + data


class Secure(os.PathLike):
    """A UNIX socket with TLS: `tls` is the `ssl.SSLContext` of its clients."""

    def __init__(self, path, tls):
        self.path, self.tls = path, tls

    def __fspath__(self):
        return os.fspath(self.path)

    def exists(self):
        return os.path.exists(self.path)


class Client:
    """A connection; `headers` is simple, structured or extended. Without `name` there is no handshake yet. It uses TLS if `at` is `Secure`."""

    def __init__(self, at, name=None, headers="structured", contexts=(), timeout_s=90, zeroes=False):
        if isinstance(at, tuple):
            self.socket = socket.create_connection(at, timeout_s)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            # With a time limit it would fail at once while the queue of the listener is full.
            self.socket.connect(os.fspath(at))
            self.socket.settimeout(timeout_s)
        self.tls = getattr(at, "tls", None)
        self.headers, self.cookie, self.contexts = "simple", 0, {}
        self.size = self.flags = None
        if name is None:
            return
        self.greet(zeroes)
        if headers != "simple":
            self.need(EXTENDED if headers == "extended" else STRUCTURED)
            self.headers = headers
        if contexts:
            self.choose(name, contexts)
        self.go(name)

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, data):
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError) as e:
            raise Gone from e

    def take(self, n):
        parts = []
        while n > 0:
            try:
                part = self.socket.recv(min(n, 1 << 20))
            except (ConnectionResetError, ssl.SSLError) as e:
                raise Gone from e
            if not part:
                raise Gone
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    def finish(self):
        """Says that nothing more comes. With TLS, this is what a client that is killed says."""
        socket.socket.shutdown(self.socket, socket.SHUT_WR)

    # The handshake.

    def greet(self, zeroes=False):
        magic, option, flags = struct.unpack(">QQH", self.take(18))
        assert magic == 0x4E42444D41474943 and option == OPTION and flags == 3, (magic, option, flags)
        self.send(struct.pack(">I", 1 if zeroes else 3))
        if self.tls:
            self.need(TLS)
            self.start_tls()

    def start_tls(self):
        try:
            self.socket = self.tls.wrap_socket(self.socket, server_hostname="localhost")
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError) as e:
            raise Gone from e

    def option(self, option, data=b"", length=None):
        self.send(struct.pack(">QII", OPTION, option, len(data) if length is None else length) + data)

    def answer(self):
        """The next reply to an option: its type and its data."""
        magic, _, kind, length = struct.unpack(">QIII", self.take(20))
        assert magic == REPLY, magic
        return kind, self.take(length)

    def answers(self, option, data=b""):
        """Sends an option, and returns the answers up to the last one."""
        self.option(option, data)
        all_of = [self.answer()]
        while all_of[-1][0] != ACK and all_of[-1][0] < 1 << 31:
            all_of.append(self.answer())
        return all_of

    def need(self, option, data=b""):
        found = self.answers(option, data)
        assert found[-1][0] == ACK, found
        return found

    def list(self):
        return [data[4:].decode() for kind, data in self.need(LIST) if kind == 2]

    def choose(self, name, contexts):
        queries = b"".join(text(context) for context in contexts)
        for kind, data in self.need(SET_META, text(name) + struct.pack(">I", len(contexts)) + queries):
            if kind == 4:
                self.contexts[data[4:].decode()] = struct.unpack(">I", data[:4])[0]

    def go(self, name):
        for kind, data in self.need(GO, text(name) + struct.pack(">HH", 1, 3)):
            if kind == 3 and data[:2] == b"\0\0":
                self.size, self.flags = struct.unpack(">QH", data[2:12])
            elif kind == 3 and data[:2] == b"\0\3":
                self.blocks = struct.unpack(">III", data[2:14])

    # Requests.

    def header(self, kind, offset=0, length=0, flags=0, cookie=None):
        if cookie is None:
            self.cookie += 1
            cookie = self.cookie
        if self.headers == "extended":
            if kind == WRITE:
                flags |= PAYLOAD
            return struct.pack(">IHHQQQ", WIDE_REQUEST, flags, kind, cookie, offset, length)
        return struct.pack(">IHHQQI", REQUEST, flags, kind, cookie, offset, length)

    def ask(self, kind, offset=0, length=0, flags=0, data=b""):
        """Sends a request, and returns its cookie."""
        header = self.header(kind, offset, length, flags)
        self.send(header + data)
        return self.cookie

    def reply(self, reads=None):
        """The next reply: cookie, error, and data or extents. `reads` has the length of each read by its cookie,
        which simple replies do not tell."""
        found, error = [], 0
        while True:
            (magic,) = struct.unpack(">I", self.take(4))
            if magic == SIMPLE:
                error, cookie = struct.unpack(">IQ", self.take(12))
                length = (reads or {}).get(cookie, 0)
                return cookie, error, self.take(length) if length and not error else b"".join(found)
            assert magic in (CHUNK, WIDE_CHUNK), hex(magic)
            flags, kind, cookie = struct.unpack(">HHQ", self.take(12))
            if magic == WIDE_CHUNK:
                _, length = struct.unpack(">QQ", self.take(16))
            else:
                (length,) = struct.unpack(">I", self.take(4))
            data = self.take(length)
            if kind == 1:
                found.append(data[8:])
            elif kind in (5, 6):
                found.append(self.extents(kind, data))
            elif kind & 1 << 15:
                (error,) = struct.unpack(">I", data[:4])
            else:
                assert kind == 0, kind
            if flags & 1:
                return cookie, error, found if found and not isinstance(found[0], bytes) else b"".join(found)

    @staticmethod
    def extents(kind, data):
        """The id of the context, and pairs of length and flags."""
        (context,) = struct.unpack(">I", data[:4])
        if kind == 6:
            return context, list(struct.iter_unpack(">QQ", data[8:]))
        return context, list(struct.iter_unpack(">II", data[4:]))

    def call(self, kind, offset=0, length=0, flags=0, data=b""):
        """Sends a request and waits for its reply: error, and data or extents."""
        cookie = self.ask(kind, offset, length, flags, data)
        found, error, data = self.reply({cookie: length} if kind == READ else None)
        assert found == cookie, (found, cookie)
        return error, data

    def read(self, offset, length):
        error, data = self.call(READ, offset, length)
        assert error == 0, error
        assert len(data) == length, len(data)
        return data

    def write(self, offset, data, flags=0):
        error, _ = self.call(WRITE, offset, len(data), flags, data)
        assert error == 0, error

    def ends(self):
        """Whether the server closes the connection; what it still sends is dropped."""
        try:
            while True:
                self.take(1)
        except Gone:
            return True
        except TimeoutError:
            return False
