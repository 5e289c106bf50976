"""What a vhost-user front end may share with us and hand over to us: memory, regions, sockets. For tests/bad-input."""

import array
import contextlib
import os
import re
import socket as sockets
import struct
import tempfile

import peer as p
import rig as r

SET_BACKEND_REQ_FD, GET_INFLIGHT_FD, RESET_DEVICE, ADD_MEM_REG = 21, 31, 34, 37
PF_BACKEND_REQ, PF_INFLIGHT, PF_RESET, PF_SLOTS = 1 << 5, 1 << 12, 1 << 13, 1 << 15

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


class Shared:
    """The tests; `ends` is a FrontEnds, whose exports they use."""

    def __init__(self, ends):
        self.ends = ends
        self.rig, self.daemon, self.socket = ends.rig, ends.daemon, ends.socket
        self.seen = 0

    def said(self, *words):
        """Wait until the daemon has written a new line with these words."""

        def line():
            lines = self.daemon.child.output().splitlines()
            return next((i for i, text in enumerate(lines) if i >= self.seen and all(w in text for w in words)), None) is not None

        r.wait_for(f"the daemon says {words}", line)

    def send(self, name, body):
        def test(c):
            self.seen = len(self.daemon.child.output().splitlines())
            body(c)

        self.ends.send(name, test)

    def field(self, name):
        """A field of /proc/PID/status of the daemon, bytes."""
        with open(f"/proc/{self.daemon.child.pid}/status") as status:
            return int(re.search(rf"^{name}:\s+(\d+) kB", status.read(), re.M)[1]) << 10

    def open(self, c, protocol=0):
        """A handshake with these protocol features besides REPLY_ACK."""
        struct.unpack("<Q", c.request(p.GET_FEATURES))
        c.message(p.SET_PROTOCOL_FEATURES, struct.pack("<Q", p.PF_MQ | p.PF_REPLY_ACK | p.PF_CONFIG | protocol))
        c.message(p.SET_OWNER)
        r.require(c.u64(p.SET_FEATURES, p.F_PROTOCOL_FEATURES | p.F_VERSION_1) == p.ACCEPTED, "features were refused")

    def memfd(self, c, size):
        fd = os.memfd_create("guest")
        c.fds.append(fd)
        os.ftruncate(fd, size)
        return fd

    def memory_tests(self):
        def cut_short(c):
            c.handshake()
            c.memory()
            kick, _ = c.ring()
            c.ram.close()  # a look of ours at what is gone would end us
            os.ftruncate(c.fds[0], 0)
            os.eventfd_write(kick, 1)
            r.require(c.closed(), "the connection stays")
            self.said("vm0", "cut memory short")

        self.send("memory cut short ends the connection, and the daemon says why", cut_short)

        def far_offsets(c):
            c.handshake()
            fd = self.memfd(c, 2 * TIB)
            before = self.field("VmSize")
            regions = [(p.GUEST + (i << 20), 1, p.USER + (i << 20), 2 * TIB - 1 - i * 4096) for i in range(8)]
            r.require(c.table(regions, [fd] * len(regions)) == p.ACCEPTED, "regions at far offsets were refused")
            more = self.field("VmSize") - before
            r.require(more < GIB, f"eight regions of a byte use {more >> 30} GiB of address space")

        self.send("regions of a byte at far offsets use little address space", far_offsets)

        def too_much(c):
            c.handshake()
            fd = self.memfd(c, 8 * TIB)
            r.require(c.table([(p.GUEST, 8 * TIB, p.USER, 0)], [fd]) == p.REFUSED, "8 TiB of address space were given")
            self.said("vm0", "more than 4096 GiB")

        self.send("a region of 8 TiB", too_much)

        def on_disk(c):
            c.handshake()
            with tempfile.TemporaryFile(dir="/var/tmp") as file:
                file.truncate(p.MEMORY)
                r.require(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], [file.fileno()]) == p.REFUSED, "it was accepted")
            self.said("vm0", "memory-may-block=on")

        def allowed():
            self.daemon.cli("disk", "add", "name=db,format=null,size=1M")
            socket = self.rig.dir / "block.sock"
            self.daemon.cli("export", "add", f"type=vhost-user-blk,name=block,disk=db,socket={socket},memory-may-block=on")
            with p.Peer(socket) as c, tempfile.TemporaryFile(dir="/var/tmp") as file:
                c.handshake()
                file.truncate(p.MEMORY)
                r.require(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], [file.fileno()]) == p.ACCEPTED, "it was refused")
            self.daemon.cli("export", "remove", "block", "--force")
            self.daemon.cli("disk", "remove", "db")

        if in_memory("/var/tmp"):
            r.Rig.line("skip bad message: memory that is a file on a disk: /var/tmp is in memory")
        else:
            self.send("memory that is a file on a disk", on_disk)
            self.rig.test("bad message: memory that is a file on a disk, where the export allows it", allowed)

    def hung_tests(self):
        """Files on a FUSE mount whose server has stopped. Even their attributes cannot be had."""

        def under(body):
            def test(c):
                self.open(c, PF_INFLIGHT | PF_SLOTS)
                with hung_file(self.rig) as fd:
                    body(c, fd)
                self.said("vm0", "memory-may-block=on")

            return test

        def memory(c, fd):
            r.require(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], [fd]) == p.REFUSED, "it was accepted")

        def added(c, fd):
            payload = struct.pack("<QQQQQ", 0, p.GUEST, p.MEMORY, p.USER, 0)
            r.require(c.order(ADD_MEM_REG, payload, [fd]) == p.REFUSED, "it was accepted")

        def inflight(c, fd):
            payload = struct.pack("<QQHHI", 4096, 0, 1, 16, 0)
            r.require(c.order(p.SET_INFLIGHT_FD, payload, [fd]) == p.REFUSED, "it was accepted")

        if not os.path.exists("/dev/fuse") or os.geteuid():
            return r.Rig.line("skip bad message: files of a FUSE server that has stopped: needs /dev/fuse and root")
        self.send("memory that is a file of a FUSE server that has stopped", under(memory))
        self.send("a region that is a file of a FUSE server that has stopped", under(added))
        self.send("an in-flight region that is a file of a FUSE server that has stopped", under(inflight))

    def inflight_tests(self):
        def inflight(c, size, queues=1, length=16, offset=0):
            self.open(c, PF_INFLIGHT | PF_RESET)
            fd = self.memfd(c, offset + size)
            payload = struct.pack("<QQHHI", size, offset, queues, length, 0)
            return c.order(p.SET_INFLIGHT_FD, payload, [fd]), fd

        def huge(c):
            answer, fd = inflight(c, GIB)
            if answer == p.ACCEPTED:
                c.order(RESET_DEVICE)
            charged = os.fstat(fd).st_blocks * 512
            r.require(charged < MIB, f"{charged >> 20} MiB were charged for a reset")
            r.require(answer == p.REFUSED, "1 GiB was accepted for a ring of 16")

        self.send("an in-flight region of a gigabyte for one small ring", huge)

        def fitting(c):
            answer, _ = inflight(c, 4096, queues=2, offset=4096)
            r.require(answer == p.ACCEPTED, "an in-flight region as other back-ends make it was refused")

        self.send("an in-flight region that is rounded up to a page", fitting)

        def moved_on(c):
            """The region moves through a large sparse file, and each place is reset."""
            self.open(c, PF_INFLIGHT | PF_RESET)
            size = 4096
            fd = self.memfd(c, GIB)
            places = [n * MIB for n in range(200)]
            for offset in places:
                payload = struct.pack("<QQHHI", size, offset, 2, 16, 0)
                r.require(c.order(p.SET_INFLIGHT_FD, payload, [fd]) == p.ACCEPTED, "the region was refused")
                r.require(c.order(RESET_DEVICE) == p.ACCEPTED, "the reset was refused")
            charged = os.fstat(fd).st_blocks * 512
            r.require(charged == 0, f"{charged >> 10} KiB were charged for resets of regions that no ring used")

        self.send("in-flight regions all over a sparse file, each of them reset", moved_on)

        def cleared(c):
            """What is in a region does not outlive a reset, wherever the file's pages are."""
            self.open(c, PF_INFLIGHT | PF_RESET)
            size, begin = 5 * 4096 - 8, 4096 + 8
            fd = self.memfd(c, MIB)
            for page in (0, 1, 4, 5, 6):
                os.pwrite(fd, b"x" * 4096, page * 4096)
            payload = struct.pack("<QQHHI", size, begin, 2, 1024, 0)
            r.require(c.order(p.SET_INFLIGHT_FD, payload, [fd]) == p.ACCEPTED, "the region was refused")
            r.require(c.order(RESET_DEVICE) == p.ACCEPTED, "the reset was refused")
            data = os.pread(fd, 7 * 4096, 0)
            r.require(data[begin : begin + size] == bytes(size), "the region has something after a reset")
            r.require(data[:begin] == b"x" * begin and data[begin + size :] == b"x" * 4096, "something beside it was cleared")

        self.send("a reset of an in-flight region with pages that the file has and has not", cleared)

        def no_such_queues(c):
            r.require(inflight(c, 4096, queues=60000)[0] == p.REFUSED, "60,000 queues were accepted")

        self.send("an in-flight region for queues that are not there", no_such_queues)

    def table_tests(self):
        def none(c):
            c.handshake()
            r.require(c.table([], []) == p.REFUSED, "a memory table without regions was accepted")
            self.said("vm0", "no region", "share=on")

        self.send("a memory table without a region is refused with the cause", none)

        def for_two(c):
            c.handshake()
            fd = self.memfd(c, p.MEMORY)
            payload = struct.pack("<II", 1, 0) + struct.pack("<QQQQ", p.GUEST, p.MEMORY, p.USER, 0) + b"\0" * 32
            r.require(c.order(p.SET_MEM_TABLE, payload, [fd]) == p.ACCEPTED, "it was refused")

        self.send("a memory table with room for two regions, as User-mode Linux sends it", for_two)

        def socket_as_call(c):
            c.handshake()
            c.memory()
            kick, _ = c.ring()
            ours, theirs = sockets.socketpair()
            with ours, theirs:
                answer = c.order(p.SET_VRING_CALL, struct.pack("<Q", 0), [theirs.fileno()])
                r.require(answer == p.ACCEPTED, "a socket as call descriptor was refused")
                c.describe(0, p.GUEST + p.DATA, 16, 1, 1)
                c.describe(1, p.GUEST + p.DATA + 4096, 512, 3, 2)
                c.describe(2, p.GUEST + p.DATA + 8192, 1, 2, 0)
                c.offer(0, kick)
                ours.settimeout(r.WAIT_S)
                r.require(len(ours.recv(8)) == 8, "the notification has no eight bytes")

        self.send("a socket as call descriptor, as User-mode Linux has it", socket_as_call)

        def no_memory(c):
            c.handshake()
            c.ring()
            self.said("vm0", "shared no memory", "memory-backend-memfd", "share=on")

        self.send("a ring starts and no memory comes: a warning says what to do", no_memory)

    def channel_tests(self):
        """The front end's own end of its connection, which we must not keep open."""

        def gone():
            name = "vm0"
            r.wait_for(
                f"the front end of {name} is gone",
                lambda: not next(e for e in self.daemon.status()["exports"] if e["name"] == name)["connected"],
                timeout_s=20,
            )

        def own_end(c):
            self.open(c, PF_BACKEND_REQ)
            c.message(SET_BACKEND_REQ_FD, fds=[c.socket.fileno()])
            c.socket.close()
            gone()

        self.send("its own end as back-end channel, then it leaves", own_end)

        def queued(c):
            self.open(c, PF_BACKEND_REQ)
            near, far = sockets.socketpair()
            far.sendmsg([b"x"], [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", [c.socket.fileno()]))])
            c.message(SET_BACKEND_REQ_FD, fds=[near.fileno()])
            for end in (near, far, c.socket):
                end.close()
            gone()

        self.send("its own end in the queue of the back-end channel, then it leaves", queued)

        def each_others(c):
            """Two connections, each of which hands over the other's end."""
            self.daemon.cli("disk", "add", "name=dx,format=null,size=1M")
            socket = self.rig.dir / "other.sock"
            self.daemon.cli("export", "add", f"type=vhost-user-blk,name=other,disk=dx,socket={socket}")
            other = p.Peer(socket)
            for one in (c, other):
                self.open(one, PF_BACKEND_REQ)
            for one, two in ((c, other), (other, c)):
                try:
                    one.message(SET_BACKEND_REQ_FD, fds=[two.socket.fileno()])
                except p.Closed:
                    pass
            other.socket.close()
            c.socket.close()
            gone()
            r.wait_for("the other export is free", lambda: self.daemon.cli("export", "remove", "other", check=False).returncode == 0, timeout_s=20)
            self.daemon.cli("disk", "remove", "dx")

        self.send("two connections that hold each other as back-end channel", each_others)

        def by_force():
            self.daemon.cli("disk", "add", "name=dx,format=null,size=1M")
            socket = self.rig.dir / "other.sock"
            self.daemon.cli("export", "add", f"type=vhost-user-blk,name=other,disk=dx,socket={socket}")
            with p.Peer(socket) as c:
                c.handshake()
                done = self.daemon.cli("export", "remove", "other", "--force")
                r.require("other" in done.stdout and "disconnected" in done.stdout, f"--force says {done.stdout!r}")
            self.daemon.cli("disk", "remove", "dx")

        self.rig.test("bad message: a removal by force says what it did", by_force)

    def tests(self):
        self.memory_tests()
        self.hung_tests()
        self.inflight_tests()
        self.table_tests()
        self.channel_tests()


@contextlib.contextmanager
def hung_file(rig):
    """A file of a FUSE mount, open, whose server has stopped. The server runs again afterwards."""
    path = rig.image("hung.mnt", 0)
    export = f"type=fuse,name=f,disk=d,mountpoint={path},writable=on"
    server = r.Daemon(rig, "--disk", f"name=d,format=ram,size={p.MEMORY}", "--export", export, name="hung")
    # The first close tells the kernel that closing asks the server nothing. Else each close would wait for it, this rig's, too.
    os.close(os.open(path, os.O_RDWR))
    fd = os.open(path, os.O_RDWR)
    try:
        server.child.suspend()
        yield fd
    finally:
        server.child.resume()
        os.close(fd)
        r.require(server.child.stop() == 0, f"the FUSE server ended badly: {server.child.tail()}")


def in_memory(path):
    """Whether a folder is on tmpfs."""
    kind = r.run(["stat", "-f", "-c", "%T", path]).stdout.strip()
    return kind in ("tmpfs", "ramfs")
