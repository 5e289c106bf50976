"""Real clients: libnbd's programs, QEMU's, fio, and vshunt itself. What they write is what they read."""

import contextlib
import json
import os
import random
import socket

import nbd_client as c
import nbd_exports as e
import pytest
import rig as r

MIB = 1 << 20
LIBNBD = "libnbd-bin"


def content(path, size=e.SIZE, seed=1):
    """A sparse file: two runs of random bytes, the rest holes."""
    chance = random.Random(seed)
    with open(path, "wb") as file:
        file.truncate(size)
        for at, length in ((0, MIB), (20 * MIB, 3 * MIB), (size - 4096, 4096)):
            file.seek(at)
            file.write(chance.randbytes(length))
    return path


def test_nbdinfo_shows_the_export(rig):
    info = r.tool("nbdinfo", LIBNBD)
    daemon = e.serve(rig, e.disk_of(rig, "raw"))
    found = json.loads(r.run([info, "--json", e.uri(daemon)]).stdout)
    export = found["exports"][0]
    r.require(found["protocol"] == "newstyle-fixed" and found["structured"], f"{found}")
    r.require(export["export-size"] == e.SIZE and export["contexts"] == [c.ALLOCATION, c.DEPTH], f"{export}")
    for flag in ("can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn", "can_df"):
        r.require(export[flag] is True, f"{flag} is missing: {export}")
    for flag in ("is_read_only", "can_cache", "can_fast_zero"):
        r.require(export[flag] is False, f"{flag}: {export}")
    r.require(export["block_size_minimum"] <= 512 and export["block_size_maximum"] == 32 * MIB, f"{export}")
    listed = json.loads(r.run([info, "--json", "--list", f"nbd+unix:///?socket={daemon.at}"]).stdout)
    r.require([x["export-name"] for x in listed["exports"]] == ["n0"], f"{listed}")
    wrong = r.run([info, e.uri(daemon, "other")], check=False)
    r.require(wrong.returncode != 0, "an export of another name is found")
    e.ends_well(daemon)


def test_nbdcopy_there_and_back(rig, kind):
    copy = r.tool("nbdcopy", LIBNBD)
    # nbdcopy gives each thread 128 MiB of the disk.
    source = content(rig.dir / f"{kind}.in", 5 * e.SIZE)
    daemon = e.serve(rig, e.disk_of(rig, kind, f"copy-{kind}", 5 * e.SIZE), workers=2, name=f"copy-{kind}")
    r.run([copy, "--connections=4", "--threads=4", "--requests=16", source, e.uri(daemon)], timeout_s=180)
    back = rig.dir / f"{kind}.out"
    r.run([copy, "--connections=4", "--threads=4", "--requests=16", e.uri(daemon), back], timeout_s=180)
    r.require(back.read_bytes() == source.read_bytes(), "the copy differs")
    if kind != "ram":
        r.require(back.stat().st_blocks * 512 < 16 * MIB, "the holes of the disk are not seen")
    used = [q for q in daemon.status()["queues"] if q["requests"] > 0]
    r.require(len(used) >= 2, f"one connection did everything: {used}")
    e.ends_well(daemon)


def test_qemu_img_there_and_back(rig, kind):
    qemu_img = r.tool("qemu-img", "qemu-utils")
    source = content(rig.dir / f"q-{kind}.in", seed=2)
    daemon = e.serve(rig, e.disk_of(rig, kind, f"qemu-{kind}"), workers=2, name=f"qemu-{kind}")
    at = e.uri(daemon)
    r.run([qemu_img, "convert", "-n", "-f", "raw", "-O", "raw", source, at], timeout_s=180)
    r.run([qemu_img, "compare", "-f", "raw", "-F", "raw", source, at], timeout_s=180)
    back = rig.dir / f"q-{kind}.qcow2"
    r.run([qemu_img, "convert", "-f", "raw", "-O", "qcow2", at, back], timeout_s=180)
    r.run([qemu_img, "compare", "-f", "raw", "-F", "qcow2", source, back], timeout_s=180)
    extents = json.loads(r.run([qemu_img, "map", "--output=json", "-f", "raw", at]).stdout)
    zero = sum(x["length"] for x in extents if x["zero"])
    if kind != "ram":
        r.require(zero >= 50 * MIB, f"the map has {zero} bytes of zeroes: {extents}")
    r.require(sum(x["length"] for x in extents) == e.SIZE, f"the map is not of the disk: {extents}")
    e.ends_well(daemon)


@pytest.mark.parametrize("headers", ("simple", "structured", "extended"))
def test_each_command_with_each_form_of_headers(rig, kind, headers):
    daemon = e.serve(rig, e.disk_of(rig, kind, f"{kind}-{headers}"), name=f"{kind}-{headers}")
    contexts = () if headers == "simple" else (c.ALLOCATION,)
    with c.Client(daemon.at, "n0", headers, contexts) as client:
        data = random.Random(3).randbytes(MIB)
        client.write(4 * MIB, data)
        client.write(8 * MIB, data, c.FUA)
        r.require(client.call(c.FLUSH) == (0, b""), "flush failed")
        r.require(client.read(4 * MIB, MIB) == data, "it reads as something else")
        r.require(client.call(c.ZERO, 4 * MIB, MIB // 2)[0] == 0, "zeroes failed")
        r.require(client.call(c.ZERO, 8 * MIB, MIB // 2, c.NO_HOLE | c.FUA)[0] == 0, "zeroes without a hole failed")
        half = bytes(MIB // 2)
        r.require(client.read(4 * MIB, MIB) == half + data[MIB // 2 :], "zeroes are not where they should be")
        r.require(client.read(8 * MIB, MIB) == half + data[MIB // 2 :], "zeroes are not where they should be")
        r.require(client.call(c.TRIM, 8 * MIB, MIB, c.FUA)[0] == 0, "trim failed")
        r.require(client.call(c.ZERO, 0, e.SIZE)[0] == 0, "zeroes of all failed")
        r.require(client.read(8 * MIB, MIB) == bytes(MIB), "not all is zero")
        longest = random.Random(4).randbytes(32 * MIB)
        client.write(0, longest)
        r.require(client.read(0, 32 * MIB) == longest, "the longest request differs")
        if contexts:
            error, found = client.call(c.STATUS, 0, e.SIZE)
            r.require(error == 0 and found[0][0] == client.contexts[c.ALLOCATION], f"{error} {found}")
            total = sum(length for length, _ in found[0][1])
            r.require(0 < total <= e.SIZE, f"the state of {total} bytes: {found}")
            error, found = client.call(c.STATUS, 0, e.SIZE, c.REQ_ONE)
            r.require(error == 0 and len(found[0][1]) == 1, f"{error} {found}")
        client.ask(c.DISC)
        r.require(client.ends(), "the connection stays after its end")
    r.wait_for("the queue is free", lambda: not e.running(daemon))
    e.ends_well(daemon)


@pytest.mark.parametrize("size", (4096, 65536, 2 * MIB))
def test_more_requests_than_a_connection_may_hold(rig, kind, size):
    """Long pipes of writes and reads: slots and memory are used up again and again."""
    daemon = e.serve(rig, e.disk_of(rig, kind, f"{kind}-{size}"), name=f"{kind}-{size}")
    count = e.SIZE // size if size > 4096 else 4096
    data = [random.Random(at).randbytes(512) * (size // 512) for at in range(count)]
    with c.Client(daemon.at, "n0") as client:

        def pipe(kind, depth):
            """Asks for all of it with `depth` requests at a time, and returns what was answered."""
            asked, places, found = {}, {}, {}
            for at in range(count):
                cookie = client.ask(kind, at * size, size, data=data[at] if kind == c.WRITE else b"")
                places[cookie] = at
                asked[cookie] = size if kind == c.READ else 0
                if len(places) - len(found) >= depth:
                    cookie, error, answer = client.reply(asked)
                    r.require(error == 0 and cookie not in found, f"request {cookie}: {error}")
                    found[cookie] = answer
            while len(found) < count:
                cookie, error, answer = client.reply(asked)
                r.require(error == 0 and cookie not in found, f"request {cookie}: {error}")
                found[cookie] = answer
            return {places[cookie]: answer for cookie, answer in found.items()}

        pipe(c.WRITE, 50)
        for depth in (8, 100):
            for at, answer in pipe(c.READ, depth).items():
                r.require(answer == data[at], f"request {at} of {size} bytes has other data")
    e.ends_well(daemon)


def test_the_old_option_still_works(rig):
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="old")
    for zeroes in (True, False):
        with c.Client(daemon.at) as client:
            client.greet(zeroes)
            client.option(c.EXPORT_NAME, b"n0")
            size, flags = client.take(8), client.take(2)
            r.require(int.from_bytes(size, "big") == e.SIZE and flags[1] & 1, f"{size} {flags}")
            if zeroes:
                r.require(client.take(124) == bytes(124), "no zeroes")
            client.write(0, b"x" * 512)
            r.require(client.read(0, 512) == b"x" * 512, "it reads as something else")
    e.ends_well(daemon)


def test_holes_and_trims_are_seen(rig):
    image = rig.image("holes.img", e.SIZE)
    daemon = e.serve(rig, f"format=raw,file={image}", name="holes")
    with c.Client(daemon.at, "n0", contexts=(c.ALLOCATION,)) as client:
        client.write(8 * MIB, b"x" * MIB)
        error, found = client.call(c.STATUS, 0, e.SIZE)
        r.require(found[0][1] == [(8 * MIB, 3), (MIB, 0), (55 * MIB, 3)], f"{error} {found}")
        r.require(client.call(c.TRIM, 8 * MIB, MIB // 2)[0] == 0, "trim failed")
        error, found = client.call(c.STATUS, 8 * MIB, MIB)
        r.require(found[0][1] == [(MIB // 2, 3), (MIB // 2, 0)], f"{error} {found}")
        r.require(os.stat(image).st_blocks * 512 <= MIB, "the trim has freed no space")
    e.ends_well(daemon)


def test_dirty_bitmaps_are_contexts(rig):
    info = r.tool("nbdinfo", LIBNBD)
    daemon = e.serve(rig, e.disk_of(rig, "raw", "dirty"), name="dirty")
    daemon.cli("bitmap", "add", "d0", "b0")
    context = "qemu:dirty-bitmap:b0"
    with c.Client(daemon.at, "n0", contexts=(c.ALLOCATION, context)) as client:
        client.write(MIB, b"x" * 65536)
        error, found = client.call(c.STATUS, 0, e.SIZE)
        dirty = dict(found)[client.contexts[context]]
        r.require(dirty == [(MIB, 0), (65536, 1), (e.SIZE - MIB - 65536, 0)], f"{error} {found}")
    with c.Client(daemon.at) as client:
        client.greet()
        client.need(c.STRUCTURED)
        listed = [data[4:].decode() for kind, data in client.need(c.LIST_META, c.text("n0") + bytes(4)) if kind == 4]
        r.require(listed == [c.ALLOCATION, c.DEPTH, context], f"{listed}")
    shown = r.run([info, "--map=" + context, e.uri(daemon)]).stdout.split()
    r.require(shown[:3] == ["0", str(MIB), "0"], f"{shown}")
    # One that has not recorded everything would make an incremental backup wrong.
    daemon.cli("bitmap", "add", "d0", "b2")
    with c.Client(daemon.at, "n0", contexts=(context,)) as before, c.Client(daemon.at, "n0", contexts=("qemu:dirty-bitmap:b2",)) as other:
        r.require(before.call(c.STATUS, 0, e.SIZE)[0] == 0 and other.call(c.STATUS, 0, e.SIZE)[0] == 0, "no state")
        for change in (("add", "d0", "b1", "--disabled"), ("disable", "d0", "b0"), ("remove", "d0", "b2")):
            daemon.cli("bitmap", *change)
        for client in (before, other):
            r.require(client.call(c.STATUS, 0, e.SIZE)[0] == c.EINVAL, "a bitmap that misses writes is shown")
    with c.Client(daemon.at) as client:
        client.greet()
        client.need(c.STRUCTURED)
        listed = [data[4:].decode() for kind, data in client.need(c.LIST_META, c.text("n0") + bytes(4)) if kind == 4]
        r.require(listed == [c.ALLOCATION, c.DEPTH], f"{listed}")
    e.ends_well(daemon)


@pytest.mark.parametrize("size", (e.SIZE + 512, e.SIZE + 3 * 512, 512))
def test_a_size_that_no_page_fits_is_served_to_its_end(rig, size):
    """A multiple of 512, on storage that may need more for O_DIRECT."""
    info = r.tool("nbdinfo", LIBNBD)
    daemon = e.serve(rig, e.disk_of(rig, "raw", f"odd-{size}", size), name=f"odd-{size}")
    export = json.loads(r.run([info, "--json", e.uri(daemon)]).stdout)["exports"][0]
    r.require(size % export["block_size_minimum"] == 0, f"{export}")
    r.require(export["export-size"] == size, f"{export}")
    with c.Client(daemon.at, "n0", contexts=(c.ALLOCATION,)) as client:
        data = random.Random(5).randbytes(512)
        client.write(size - 512, data)
        r.require(client.read(size - 512, 512) == data, "the last sector differs")
        error, found = client.call(c.STATUS, 0, size)
        r.require(error == 0 and sum(length for length, _ in found[0][1]) == size, f"{error} {found}")
    e.ends_well(daemon)


def test_where_data_is_on_a_disk_with_many_small_pieces(rig):
    """The first answer does not reach the end of the range. Later questions begin where it ends. All answers together are right."""
    daemon = e.serve(rig, e.disk_of(rig, "qcow2", "pieces"), name="pieces")
    with c.Client(daemon.at, "n0", contexts=(c.ALLOCATION,)) as client:
        for at in range(0, e.SIZE, 128 << 10):
            client.write(at, b"p" * 512)
        found, at = [], 0
        error, answer = client.call(c.STATUS, 0, e.SIZE)
        first = sum(length for length, _ in answer[0][1])
        r.require(0 < first < e.SIZE, f"the first answer is about {first} bytes")
        while at < e.SIZE:
            error, answer = client.call(c.STATUS, at, e.SIZE - at)
            runs = answer[0][1]
            r.require(error == 0 and runs, f"{error} {answer}")
            found += runs
            at += sum(length for length, _ in runs)
        r.require(joined(found) == [(65536, 0), (65536, 3)] * (e.SIZE >> 17), f"{found[:8]}")
    e.ends_well(daemon)


def test_a_disk_of_a_qcow2_chain_shows_its_holes(rig):
    qemu_img = r.tool("qemu-img", "qemu-utils")
    base, top = rig.dir / "base.qcow2", rig.dir / "top.qcow2"
    r.run([r.binary("vshunt"), "image", "create", "-f", "qcow2", base, str(e.SIZE)])
    r.run([r.tool("qemu-io", "qemu-utils"), "-c", "write -P 7 1M 1M", base])
    r.run([qemu_img, "create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", top])
    daemon = e.serve(rig, f"format=qcow2,file={top}", name="chain")
    with c.Client(daemon.at, "n0", contexts=(c.ALLOCATION,)) as client:
        client.write(4 * MIB, b"x" * 65536)
        error, found = client.call(c.STATUS, 0, e.SIZE)
        states = [flags for _, flags in found[0][1]]
        r.require(error == 0 and states[:5] == [3, 0, 3, 0, 3], f"{found}")
        r.require(client.read(MIB, 512) == b"\7" * 512, "the backing image is not read")
    e.ends_well(daemon)


def joined(runs):
    """Runs of length and state, joined where the state is the same."""
    found = []
    for length, state in runs:
        if found and found[-1][1] == state:
            length += found.pop()[0]
        found.append((length, state))
    return found


def depths(info, uri):
    """The allocation depths of an export."""
    shown = json.loads(r.run([info, "--json", f"--map={c.DEPTH}", uri]).stdout)
    return joined((extent["length"], extent["type"]) for extent in shown)


def test_allocation_depths_are_those_of_qemu(rig):
    """A raw image that is shorter than the others, two qcow2 images on it, and one whose chain ends."""
    import nbd_servers as n

    info, qemu_img, io = r.tool("nbdinfo", LIBNBD), r.tool("qemu-img", "qemu-utils"), r.tool("qemu-io", "qemu-utils")
    qemu_nbd, socket = r.tool("qemu-nbd", "qemu-utils"), rig.dir / "q.sock"
    chance = random.Random(12)

    def scatter(image, size, form="qcow2"):
        commands = []
        for _ in range(12):
            at, length = chance.randrange(size >> 16) << 16, chance.randrange(1, 16) << 16
            kind = chance.choice(("write", "write -z", "write -zu", "discard")) if form == "qcow2" else "write"
            commands += ["-c", f"{kind} {at} {min(length, size - at)}"]
        r.run([io, "-d", "unmap", "-f", form, *commands, image])

    for bottom in ("raw", None):
        base, middle, top = (rig.dir / f"{bottom}-{name}" for name in ("base", "middle", "top"))
        if bottom:
            base.touch()
            os.truncate(base, e.SIZE // 2)
            scatter(base, e.SIZE // 2, "raw")
            r.run([qemu_img, "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", middle, e.SIZE])
        else:
            r.run([qemu_img, "create", "-q", "-f", "qcow2", middle, e.SIZE])
        scatter(middle, e.SIZE)
        r.run([qemu_img, "create", "-q", "-f", "qcow2", "-b", middle, "-F", "qcow2", top, e.SIZE])
        scatter(top, e.SIZE)
        server = n.Server(rig, f"qemu-{bottom}", [qemu_nbd, "-r", "-A", "-t", "-f", "qcow2", "-k", socket, top], socket)
        wanted = depths(info, server.uri())
        server.kill()
        daemon = e.serve(rig, f"format=qcow2,file={top}", name=f"depth-{bottom}")
        found = depths(info, e.uri(daemon))
        r.require(found == wanted, f"{found}, and QEMU says {wanted}")
        r.require({state for _, state in found} == ({1, 2, 3} if bottom else {0, 1, 2}), f"{found}")
        with c.Client(daemon.at, "n0", contexts=(c.ALLOCATION, c.DEPTH)) as client:
            at, both = 0, {c.ALLOCATION: [], c.DEPTH: []}
            while at < e.SIZE:
                error, answer = client.call(c.STATUS, at, e.SIZE - at)
                r.require(error == 0 and len(answer) == 2, f"{error} {answer}")
                step = min(sum(length for length, _ in runs) for _, runs in answer)
                for name, number in client.contexts.items():
                    left = step
                    for length, state in dict(answer)[number]:
                        both[name].append((min(length, left), state))
                        left -= min(length, left)
                at += step
            r.require(joined(run for run in both[c.DEPTH] if run[0]) == wanted, f"{both}")
            r.require({state for _, state in both[c.ALLOCATION]} == {0, 3}, f"{both}")
        e.ends_well(daemon)


@pytest.mark.parametrize("kind", ("raw", "ram"))
def test_without_a_chain_everything_is_at_the_top(rig, kind):
    info = r.tool("nbdinfo", LIBNBD)
    daemon = e.serve(rig, e.disk_of(rig, kind, f"top-{kind}"), name=f"top-{kind}")
    r.require(depths(info, e.uri(daemon)) == [(e.SIZE, 1)], f"{depths(info, e.uri(daemon))}")
    e.ends_well(daemon)


def test_fio_verifies(rig, kind):
    fio = r.tool("fio", "fio")
    if "nbd" not in r.run([fio, "--enghelp"]).stdout.split():
        raise r.Skipped("fio has no nbd engine")
    daemon = e.serve(rig, e.disk_of(rig, kind, f"fio-{kind}"), workers=2, name=f"fio-{kind}")
    job = ["--name=j", "--ioengine=nbd", f"--uri={e.uri(daemon)}", "--rw=randrw", "--bs=4k", "--iodepth=16"]
    r.run([fio, *job, "--size=24M", "--verify=crc32c", "--verify_fatal=1", f"--directory={rig.dir}"], timeout_s=300, cwd=rig.dir)
    queue = daemon.status()["queues"][0]
    r.require(queue["reads"] > 1000 and queue["writes"] > 1000, f"{queue}")
    e.ends_well(daemon)


@pytest.mark.root
def test_nbdfuse_mounts_it(rig, clock, guarded):
    nbdfuse = r.tool("nbdfuse", LIBNBD)
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="fuse")
    folder = rig.dir / "mnt"
    folder.mkdir()
    mount = r.Child(rig, "nbdfuse", [nbdfuse, folder, e.uri(daemon)])
    file = folder / "nbd"
    r.wait_for("nbdfuse mounts", lambda: mount.running() and file.exists())
    data = random.Random(5).randbytes(3 * MIB)
    with open(file, "r+b") as f:
        f.seek(MIB)
        f.write(data)
        os.fsync(f.fileno())
    with open(file, "rb") as f:
        f.seek(MIB)
        r.require(f.read(len(data)) == data, "it reads as something else")
    r.run(["fusermount3", "-u", folder])
    mount.wait()
    e.ends_well(daemon)


def test_over_tcp(rig):
    import nbd_servers as n

    port = n.free_port()
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="tcp", listen=port)
    with c.Client(("127.0.0.1", port), "n0") as client:
        client.write(0, b"y" * MIB)
        r.require(client.read(0, MIB) == b"y" * MIB, "it reads as something else")
    shown = daemon.cli("export", "list").stdout
    r.require(f"127.0.0.1:{port}" in shown, shown)
    taken = r.run(
        [r.binary("vshunt"), "serve", "--disk", "name=d0,format=ram,size=1M", "--no-control", "--export", f"type=nbd,name=n0,disk=d0,listen={port}"],
        check=False,
    )
    r.message_of(taken, "another program", "another port")
    e.ends_well(daemon)


@pytest.mark.root
@pytest.mark.parametrize("control", (True, False))
def test_on_a_port_below_1024(rig, control):
    """The capability for it outlives the start of the sandbox, also without a control socket."""
    port = free_low_port()
    if control:
        daemon = e.serve(rig, e.disk_of(rig, "ram"), name="low", writable="off")
        daemon.cli("export", "add", e.export(rig, "n1", listen=port))
        child = daemon.child
    else:
        argv = [r.binary("vshunt"), "serve", "--no-control", "--disk", f"name=d0,format=ram,size={e.SIZE}"]
        child = r.Child(rig, "low", [*argv, "--export", e.export(rig, "n1", listen=port)])

    def answers():
        with contextlib.suppress(ConnectionRefusedError), c.Client(("127.0.0.1", port), "n1") as client:
            client.write(0, b"l" * 512)
            return client.read(0, 512) == b"l" * 512
        return False

    r.wait_for("the export answers", answers)
    r.require(child.stop() == 0, child.tail())


def free_low_port():
    for port in range(1023, 512, -1):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise r.Skipped("no port below 1024 is free")


def test_several_connections_see_the_same_disk(rig):
    daemon = e.serve(rig, e.disk_of(rig, "raw", "multi"), workers=2, name="multi")
    clients = [c.Client(daemon.at, "n0") for _ in range(8)]
    for at, client in enumerate(clients):
        client.write(at * MIB, bytes([at + 1]) * MIB)
    r.require(clients[0].call(c.FLUSH)[0] == 0, "flush failed")
    for at, client in enumerate(reversed(clients)):
        r.require(client.read(at * MIB, MIB) == bytes([at + 1]) * MIB, "another connection sees other bytes")
    workers = {q["worker"] for q in e.running(daemon)}
    r.require(len(workers) == 2, f"all connections are on workers {workers}")
    for client in clients:
        client.close()
    e.ends_well(daemon)


def test_vshunt_is_a_client(rig, kind):
    """Verified load on a disk on an NBD export of another daemon, while the queues of both move."""
    import nbd_servers as n

    server = e.serve(rig, e.disk_of(rig, kind, f"own-{kind}"), workers=2, name=f"own-{kind}")
    disk = f"name=d0,uri={e.uri(server)}"
    client = r.Daemon(rig, "--disk", disk, "--export", n.export(rig), name=f"client-{kind}")
    load = r.Child(rig, f"load-{kind}", n.load(rig, "--size", "32M", bs="16k"))
    workers = [w["id"] for w in server.status()["workers"]]
    turn = 0
    while load.running():
        for queue in e.running(server):
            turn += 1
            server.cli("attach", "--timeout", "20s", f"n0:{queue['index']}", str(workers[turn % len(workers)]), check=False)
    code = load.wait(300)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    r.require(turn > 2, "no queue has moved")
    e.ends_well(client)
    e.ends_well(server)


def test_pipes_of_requests_with_moves(rig):
    """Half a request stays where it is when its queue moves, and the rest follows to the new worker."""
    daemon = e.serve(rig, e.disk_of(rig, "raw", "half"), workers=2, name="half")
    workers = [w["id"] for w in daemon.status()["workers"]]
    with c.Client(daemon.at, "n0") as client:
        data = random.Random(6).randbytes(MIB)
        message = client.header(c.WRITE, 0, MIB) + data
        for at, part in enumerate((message[:10], message[10:20], message[20:5000], message[5000:500_000])):
            client.send(part)
            daemon.attach("n0:0", workers[at % 2 + 1])
        client.send(message[500_000:])
        r.require(client.reply()[1] == 0, "the write failed")
        # Replies that the client does not read yet move, too.
        asked = {client.ask(c.READ, 0, MIB): MIB for _ in range(20)}
        daemon.attach("n0:0", workers[1])
        daemon.attach("n0:0", workers[2])
        for _ in asked:
            cookie, error, found = client.reply(asked)
            r.require(error == 0 and found == data, f"reply {cookie} differs")
    e.ends_well(daemon)
