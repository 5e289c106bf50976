"""Clients that break the protocol, send without end, or do not read. Others are served beside them."""

import contextlib
import os
import random
import socket
import ssl
import struct
import time

import nbd_client as c
import nbd_exports as e
import pytest
import rig as r

MIB = 1 << 20
# What a daemon may hold for one connection, and some for all else.
HELD_BYTES = 48 * MIB


def resident(daemon):
    """Bytes of memory of the daemon."""
    with open(f"/proc/{daemon.child.pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def still_serves(daemon):
    """A client is served, whatever others do."""
    with c.Client(daemon.at, "n0") as client:
        client.write(0, b"s" * 4096)
        r.require(client.read(0, 4096) == b"s" * 4096, "it reads as something else")


def greeted(daemon):
    client = c.Client(daemon.at)
    client.greet()
    return client


def handshake(way, daemon):
    """A client whose handshake goes wrong in this way."""
    if way == "flags":
        client = c.Client(daemon.at)
        client.take(18)
        client.send(struct.pack(">I", 0xFFFFFFFF))
        return client
    client = greeted(daemon)
    if way == "magic":
        client.send(b"x" * 16)
    elif way == "option-4g":
        client.option(c.GO, b"", 0xFFFFFFFF)
    elif way == "option-long":
        client.option(c.GO, bytes(100), 1 << 20)
    elif way == "many":
        client.socket.settimeout(90)
        for _ in range(2000):
            try:
                client.option(77)
                client.answer()
            except c.Gone:
                break
    return client


@pytest.mark.parametrize("way", ("flags", "magic", "option-4g", "option-long", "many"))
def test_a_handshake_that_breaks_the_protocol_ends(served, way):
    client = handshake(way, served)
    r.require(client.ends(), "the client is still connected")
    r.wait_for("the log line", lambda: "breaks the protocol" in served.child.output())
    still_serves(served)


def test_options_that_make_no_sense_are_answered(served):
    chance = random.Random(7)
    with greeted(served) as client:
        for _ in range(300):
            option = chance.choice((3, 5, 6, 8, 9, 10, 11, 12, 99, 0xFFFFFFFF))
            found = client.answers(option, chance.randbytes(chance.randrange(40)))
            r.require(found[-1][0] == c.ACK or found[-1][0] >= 1 << 31, f"{found}")
        # It is as good as new.
        client.go("n0")
        r.require(client.call(c.FLUSH)[0] == 0, "the connection does not work")


def test_a_client_that_asks_and_does_not_read_is_not_read_from(served):
    with greeted(served) as client:
        option = struct.pack(">QII", c.OPTION, c.LIST, 0) * 4096
        client.socket.setblocking(False)
        sent = 0
        # It has to stay full while others are served: a server that is only slow reads on.
        for _ in range(3):
            with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                while sent < 64 * MIB:
                    sent += client.socket.send(option)
            still_serves(served)
        r.require(sent < 16 * MIB, f"the server has read {sent} bytes of options")


def test_a_thousand_silent_clients_keep_nobody_out(served):
    silent = []
    before = resident(served)
    for _ in range(1000):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(os.fspath(served.at))
        silent.append(peer)
    still_serves(served)
    r.require(resident(served) < before + 32 * MIB, "silent clients cost memory")
    threads = len(r.thread_ids(served.child.pid))
    r.require(threads < 40, f"{threads} threads")
    for peer in silent:
        peer.close()


def test_half_a_handshake_is_given_up(served):
    start = time.monotonic()
    with greeted(served) as client:
        client.send(b"IHAVE")
        client.socket.settimeout(60)
        r.require(client.ends(), "the client is still connected")
        r.require(time.monotonic() - start > 5, "it was given up at once")
    r.wait_for("the log line", lambda: "handshake took more than" in served.child.output())


@pytest.mark.parametrize("headers", ("simple", "structured", "extended"))
def test_requests_that_are_refused(served, headers):
    cases = (
        (c.READ, e.SIZE, 512, 0, c.EINVAL),
        (c.READ, 1 << 63, 512, 0, c.EINVAL),
        (c.READ, (1 << 64) - 512, 1024, 0, c.EINVAL),
        (c.READ, 0, 33 * MIB, 0, c.EINVAL),
        (c.READ, 0, 512, 1 << 15, c.EINVAL),
        (c.WRITE, e.SIZE, 512, 0, c.ENOSPC),
        (c.WRITE, e.SIZE - 512, 1024, 0, c.ENOSPC),
        (c.WRITE, 0, 512, c.NO_HOLE, c.EINVAL),
        (c.ZERO, 512, e.SIZE, 0, c.ENOSPC),
        (c.ZERO, 0, 0xFFFFFE00, 0, c.ENOSPC),
        (c.ZERO, 0, 512, 1 << 4, c.EINVAL),
        (c.TRIM, 512, e.SIZE, 0, c.EINVAL),
        (c.CACHE, 0, 512, 0, c.EINVAL),
        (c.STATUS, 0, 512, 0, c.EINVAL),
        (77, 0, 512, 0, c.EINVAL),
    )
    with c.Client(served.at, "n0", headers) as client:
        client.write(0, b"r" * 4096)
        for kind, offset, length, flags, wanted in cases:
            data = bytes(length) if kind == c.WRITE else b""
            error, _ = client.call(kind, offset, length, flags, data)
            r.require(error == wanted, f"command {kind} at {offset} of {length}: {error}, not {wanted}")
        r.require(client.read(0, 4096) == b"r" * 4096, "a refused request has changed something")


@pytest.mark.parametrize("headers", ("simple", "structured", "extended"))
def test_requests_of_no_bytes_change_nothing_and_succeed(served, headers):
    """Also at the end of the disk. Only a question about no bytes has no answer."""
    with c.Client(served.at, "n0", headers, contexts=() if headers == "simple" else (c.ALLOCATION,)) as client:
        client.write(0, b"z" * 4096)
        for at in (0, 512, e.SIZE):
            for kind in (c.READ, c.WRITE, c.TRIM, c.ZERO):
                found = client.call(kind, at, 0)
                r.require(found == (0, b""), f"command {kind} at {at}: {found}")
            r.require(client.call(c.STATUS, at, 0)[0] == c.EINVAL, "a question about no bytes has an answer")
        r.require(client.read(0, 4096) == b"z" * 4096, "a request of no bytes has changed something")


def test_the_data_of_a_long_write_that_is_refused_is_dropped(rig):
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="dropped", writable="off")
    with c.Client(daemon.at, "n0") as client:
        for length in (512, MIB, 32 * MIB):
            error, _ = client.call(c.WRITE, 0, length, data=b"d" * length)
            r.require(error == c.EPERM, f"a write of {length} bytes: {error}")
        r.require(client.read(0, 512) == bytes(512), "a refused write has changed something")
    e.ends_well(daemon)


def test_an_end_with_an_unknown_flag_is_an_end(served):
    with c.Client(served.at, "n0") as client:
        client.ask(c.DISC, flags=1 << 9)
        r.require(client.ends(), "the connection stays after its end")


@pytest.mark.parametrize("way", ("magic", "write-4g", "random"))
def test_requests_that_break_the_protocol_end_the_connection(served, way):
    client = c.Client(served.at, "n0")
    client.write(0, b"r" * 4096)
    if way == "magic":
        client.send(b"\0" * 28)
    elif way == "write-4g":
        client.send(client.header(c.WRITE, 0, 0xFFFFFFFF))
    else:
        try:
            for seed in range(200):
                client.send(b"\xff" + random.Random(seed).randbytes(5000))
        except c.Gone:
            pass
    r.require(client.ends(), "the client is still connected")
    r.wait_for("the queue is free", lambda: not e.running(served))
    r.require("is disconnected: it sent" in served.child.output(), served.child.output())
    still_serves(served)


def test_half_requests_of_clients_that_go(served):
    for part in (1, 27, 28, 29, 1000, 70_000, MIB + 27):
        client = c.Client(served.at, "n0")
        client.send((client.header(c.WRITE, 0, MIB) + bytes(MIB))[:part])
        if part % 2:
            client.finish()
            r.require(client.ends(), "the client is still connected")
        client.close()
        r.wait_for("the queue is free", lambda: not e.running(served))
    still_serves(served)


def test_a_client_that_never_reads_costs_little_and_delays_nobody(served):
    before = resident(served)
    greedy = [c.Client(served.at, "n0") for _ in range(4)]
    for client in greedy:
        client.socket.settimeout(1)
        try:
            for _ in range(20_000):
                client.send(client.header(c.READ, 0, MIB) * 64)
        except TimeoutError:
            pass
    still_serves(served)
    grown = resident(served) - before
    r.require(grown < 4 * HELD_BYTES, f"the daemon has {grown >> 20} MiB more")
    for queue in e.running(served):
        r.require(queue["in-flight"] <= 64, f"{queue}")
    # Their queues move although nobody reads.
    worker = served.worker_new()
    for queue in e.running(served):
        served.attach(f"n0:{queue['index']}", worker)
    still_serves(served)
    # One of them begins to read, and is answered.
    client = greedy[0]
    client.socket.settimeout(90)
    cookie, error, data = client.reply()
    r.require((cookie, error, data[4096:]) == (1, 0, bytes(MIB - 4096)), f"{cookie} {error}")
    for client in greedy:
        client.close()
    r.wait_for("the queues are free", lambda: not e.running(served))


def test_floods_beside_verified_reads(served):
    """All kinds of requests in a random order, with replies read late, beside a client that is verified."""
    steady = c.Client(served.at, "n0")
    data = random.Random(8).randbytes(2 * MIB)
    steady.write(0, data)
    chance = random.Random(9)
    for _ in range(6):
        with c.Client(served.at, "n0", chance.choice(("simple", "structured", "extended"))) as client:
            client.socket.settimeout(0.2)
            try:
                for _ in range(2000):
                    kind = chance.choice((c.READ, c.WRITE, c.FLUSH, c.TRIM, c.ZERO, c.STATUS, 50))
                    offset = (2 + chance.randrange(60)) * MIB
                    length = chance.choice((0, 1, 512, 4096, 65536, 2 * MIB))
                    message = client.header(kind, offset, length, chance.choice((0, 0, c.FUA)))
                    client.send(message + (bytes(length) if kind == c.WRITE else b""))
            except (TimeoutError, c.Gone):
                pass
        r.require(steady.read(0, 2 * MIB) == data, "another client reads something else")
    steady.close()


@pytest.mark.parametrize("kind", (c.READ, c.WRITE))
def test_all_requests_before_the_end_of_a_client_are_answered(served, kind):
    """More requests than a connection may hold, then nothing more is sent (SHUT_WR). The last write is cut off."""
    count, size = 300, MIB // 2
    with c.Client(served.at, "n0") as client:
        asked = {}
        if kind == c.READ:
            client.send(b"".join(client.header(kind, n % 64 * MIB, size) for n in range(count)))
            client.finish()
        else:
            size = 512
            client.send(b"".join(client.header(kind, n * 4096, size) + bytes([n % 251]) * size for n in range(count)))
            client.send(client.header(kind, 4 * MIB, MIB) + b"z" * 100)
            client.finish()
        for _ in range(count):
            cookie, error, data = client.reply()
            r.require(error == 0 and cookie not in asked, f"request {cookie}: {error}")
            asked[cookie] = data
        r.require(client.ends(), "the connection stays open")
    r.wait_for("the queue is free", lambda: not e.running(served))
    with c.Client(served.at, "n0") as client:
        if kind == c.WRITE:
            for n in range(count):
                r.require(client.read(n * 4096, 512) == bytes([n % 251]) * 512, f"write {n} is lost")
            r.require(client.read(4 * MIB, 512) == bytes(512), "half a write was done")


def test_options_at_once_are_all_answered(served):
    """Options of all lengths in one piece, so that the thread of the export looks at them in several turns."""
    for large in range(1, 8):
        with greeted(served) as client:
            data = bytes(65536 - 16)
            one = struct.pack(">QII", c.OPTION, 77, len(data)) + data
            client.send(one * large * 2)
            for _ in range(large * 2):
                kind, _ = client.answer()
                r.require(kind == (1 << 31) + 1, f"{kind:#x}")
