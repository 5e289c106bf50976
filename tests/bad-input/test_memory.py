"""Tests bad memory, in-flight regions and sockets that a front end shares with the daemon."""

import array
import contextlib
import os
import re
import socket as sockets
import struct
import tempfile

import peer as p
import pytest
import rig as r

SET_BACKEND_REQ_FD, RESET_DEVICE, ADD_MEM_REG = 21, 34, 37
PF_BACKEND_REQ, PF_INFLIGHT, PF_RESET, PF_SLOTS = 1 << 5, 1 << 12, 1 << 13, 1 << 15

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


class Shared:
    """The daemon, and its output from now on."""

    def __init__(self, served):
        self.rig, self.daemon = served.rig, served.daemon
        self.seen = len(self.daemon.child.output().splitlines())

    def said(self, *words):
        """Wait until the daemon has written a new line with these words."""

        def line():
            lines = self.daemon.child.output().splitlines()
            return any(all(w in text for w in words) for text in lines[self.seen :])

        r.wait_for(f"the daemon says {words}", line)

    def field(self, name):
        """A field of /proc/PID/status of the daemon, bytes."""
        with open(f"/proc/{self.daemon.child.pid}/status") as status:
            return int(re.search(rf"^{name}:\s+(\d+) kB", status.read(), re.M)[1]) << 10


@pytest.fixture
def shared(served):
    return Shared(served)


def opened(c, protocol=0):
    """A handshake with REPLY_ACK and these protocol features."""
    struct.unpack("<Q", c.request(p.GET_FEATURES))
    c.message(p.SET_PROTOCOL_FEATURES, struct.pack("<Q", p.PF_MQ | p.PF_REPLY_ACK | p.PF_CONFIG | protocol))
    c.message(p.SET_OWNER)
    r.require(c.u64(p.SET_FEATURES, p.F_PROTOCOL_FEATURES | p.F_VERSION_1) == p.ACCEPTED, "features were refused")


def memfd(c, size):
    fd = os.memfd_create("guest")
    c.fds.append(fd)
    os.ftruncate(fd, size)
    return fd


@contextlib.contextmanager
def hung_file(rig):
    """A file of a FUSE mount, open, whose server has stopped. The server runs again afterwards."""
    path = rig.image("hung.mnt", 0)
    export = f"type=fuse,name=f,disk=d,mountpoint={path},writable=on"
    server = r.Daemon(rig, "--disk", f"name=d,format=ram,size={p.MEMORY}", "--export", export, name="hung")
    # The first close tells the kernel that closing asks the server nothing. Otherwise each close
    # would wait, also this process's.
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


def test_memory_cut_short_ends_the_connection_and_the_daemon_says_why(c, shared):
    c.handshake()
    c.memory()
    kick, _ = c.ring()
    c.ram.close()  # an access to it would now end this process
    os.ftruncate(c.fds[0], 0)
    os.eventfd_write(kick, 1)
    r.require(c.closed(), "the connection stays")
    shared.said("vm0", "cut memory short")


def test_regions_of_a_byte_at_far_offsets_use_little_address_space(c, shared):
    c.handshake()
    fd = memfd(c, 2 * TIB)
    before = shared.field("VmSize")
    regions = [(p.GUEST + (i << 20), 1, p.USER + (i << 20), 2 * TIB - 1 - i * 4096) for i in range(8)]
    r.require(c.table(regions, [fd] * len(regions)) == p.ACCEPTED, "regions at far offsets were refused")
    more = shared.field("VmSize") - before
    r.require(more < GIB, f"eight regions of a byte use {more >> 30} GiB of address space")


def test_a_region_of_8_tib(c, shared):
    c.handshake()
    fd = memfd(c, 8 * TIB)
    r.require(c.table([(p.GUEST, 8 * TIB, p.USER, 0)], [fd]) == p.REFUSED, "8 TiB of address space were given")
    shared.said("vm0", "more than 4096 GiB")


# Evaluated when the file is collected: a folder in memory cannot stand for a disk.
NEEDS_DISK = pytest.mark.skipif(in_memory("/var/tmp"), reason="/var/tmp is in memory")


@NEEDS_DISK
def test_memory_that_is_a_file_on_a_disk(c, shared):
    c.handshake()
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.truncate(p.MEMORY)
        r.require(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], [file.fileno()]) == p.REFUSED, "it was accepted")
    shared.said("vm0", "memory-may-block=on")


@NEEDS_DISK
def test_memory_that_is_a_file_on_a_disk_where_the_export_allows_it(shared):
    shared.daemon.cli("disk", "add", "name=db,format=null,size=1M")
    socket = shared.rig.dir / "block.sock"
    shared.daemon.cli("export", "add", f"type=vhost-user-blk,name=block,disk=db,socket={socket},memory-may-block=on")
    with p.Peer(socket) as c, tempfile.TemporaryFile(dir="/var/tmp") as file:
        c.handshake()
        file.truncate(p.MEMORY)
        r.require(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], [file.fileno()]) == p.ACCEPTED, "it was refused")
    shared.daemon.cli("export", "remove", "block", "--force")
    shared.daemon.cli("disk", "remove", "db")


def memory(c, fd):
    r.require(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], [fd]) == p.REFUSED, "it was accepted")


def added(c, fd):
    payload = struct.pack("<QQQQQ", 0, p.GUEST, p.MEMORY, p.USER, 0)
    r.require(c.order(ADD_MEM_REG, payload, [fd]) == p.REFUSED, "it was accepted")


def an_inflight_region(c, fd):
    payload = struct.pack("<QQHHI", 4096, 0, 1, 16, 0)
    r.require(c.order(p.SET_INFLIGHT_FD, payload, [fd]) == p.REFUSED, "it was accepted")


@pytest.mark.parametrize("body", (memory, added, an_inflight_region))
def test_a_file_of_a_fuse_server_that_has_stopped(c, body, shared):
    """Even the attributes of such a file cannot be read."""
    if not os.path.exists("/dev/fuse") or os.geteuid():
        raise r.Skipped("needs /dev/fuse and root")
    opened(c, PF_INFLIGHT | PF_SLOTS)
    with hung_file(shared.rig) as fd:
        body(c, fd)
    shared.said("vm0", "memory-may-block=on")


def inflight(c, size, queues=1, length=16, offset=0):
    opened(c, PF_INFLIGHT | PF_RESET)
    fd = memfd(c, offset + size)
    payload = struct.pack("<QQHHI", size, offset, queues, length, 0)
    return c.order(p.SET_INFLIGHT_FD, payload, [fd]), fd


def test_an_in_flight_region_of_a_gigabyte_for_one_small_ring(c):
    answer, fd = inflight(c, GIB)
    if answer == p.ACCEPTED:
        c.order(RESET_DEVICE)
    charged = os.fstat(fd).st_blocks * 512
    r.require(charged < MIB, f"{charged >> 20} MiB were charged for a reset")
    r.require(answer == p.REFUSED, "1 GiB was accepted for a ring of 16")


def test_an_in_flight_region_that_is_rounded_up_to_a_page(c):
    answer, _ = inflight(c, 4096, queues=2, offset=4096)
    r.require(answer == p.ACCEPTED, "an in-flight region as other back-ends make it was refused")


def test_in_flight_regions_all_over_a_sparse_file_each_of_them_reset(c):
    """The region moves through a large sparse file, and each place is reset."""
    opened(c, PF_INFLIGHT | PF_RESET)
    size = 4096
    fd = memfd(c, GIB)
    places = [n * MIB for n in range(200)]
    for offset in places:
        payload = struct.pack("<QQHHI", size, offset, 2, 16, 0)
        r.require(c.order(p.SET_INFLIGHT_FD, payload, [fd]) == p.ACCEPTED, "the region was refused")
        r.require(c.order(RESET_DEVICE) == p.ACCEPTED, "the reset was refused")
    charged = os.fstat(fd).st_blocks * 512
    r.require(charged == 0, f"{charged >> 10} KiB were charged for resets of regions that no ring used")


def test_a_reset_of_an_in_flight_region_with_pages_that_the_file_has_and_has_not(c):
    """A reset clears the region, both in pages that the file has and in holes."""
    opened(c, PF_INFLIGHT | PF_RESET)
    size, begin = 5 * 4096 - 8, 4096 + 8
    fd = memfd(c, MIB)
    for page in (0, 1, 4, 5, 6):
        os.pwrite(fd, b"x" * 4096, page * 4096)
    payload = struct.pack("<QQHHI", size, begin, 2, 1024, 0)
    r.require(c.order(p.SET_INFLIGHT_FD, payload, [fd]) == p.ACCEPTED, "the region was refused")
    r.require(c.order(RESET_DEVICE) == p.ACCEPTED, "the reset was refused")
    data = os.pread(fd, 7 * 4096, 0)
    r.require(data[begin : begin + size] == bytes(size), "the region has something after a reset")
    r.require(data[:begin] == b"x" * begin and data[begin + size :] == b"x" * 4096, "something beside it was cleared")


def test_an_in_flight_region_for_queues_that_are_not_there(c):
    r.require(inflight(c, 4096, queues=60000)[0] == p.REFUSED, "60,000 queues were accepted")


def test_a_memory_table_without_a_region_is_refused_with_the_cause(c, shared):
    c.handshake()
    r.require(c.table([], []) == p.REFUSED, "a memory table without regions was accepted")
    shared.said("vm0", "no region", "share=on")


def test_a_memory_table_with_room_for_two_regions_as_user_mode_linux_sends_it(c):
    c.handshake()
    fd = memfd(c, p.MEMORY)
    payload = struct.pack("<II", 1, 0) + struct.pack("<QQQQ", p.GUEST, p.MEMORY, p.USER, 0) + b"\0" * 32
    r.require(c.order(p.SET_MEM_TABLE, payload, [fd]) == p.ACCEPTED, "it was refused")


def test_a_socket_as_call_descriptor_as_user_mode_linux_has_it(c):
    c.handshake()
    c.memory()
    kick, _ = c.ring()
    ours, theirs = sockets.socketpair()
    with ours, theirs:
        answer = c.order(p.SET_VRING_CALL, struct.pack("<Q", 0), [theirs.fileno()])
        r.require(answer == p.ACCEPTED, "a socket as call descriptor was refused")
        c.describe_read()
        c.offer(0, kick)
        ours.settimeout(r.WAIT_S)
        r.require(len(ours.recv(8)) == 8, "the notification has no eight bytes")


def test_a_ring_starts_and_no_memory_comes_a_warning_says_what_to_do(c, shared):
    c.handshake()
    c.ring()
    shared.said("vm0", "shared no memory", "memory-backend-memfd", "share=on")


def gone(shared):
    name = "vm0"
    r.wait_for(
        f"the front end of {name} is gone",
        lambda: not next(e for e in shared.daemon.status()["exports"] if e["name"] == name)["connected"],
    )


def test_its_own_end_as_back_end_channel_then_it_leaves(c, shared):
    opened(c, PF_BACKEND_REQ)
    c.message(SET_BACKEND_REQ_FD, fds=[c.socket.fileno()])
    c.socket.close()
    gone(shared)


def test_its_own_end_in_the_queue_of_the_back_end_channel_then_it_leaves(c, shared):
    opened(c, PF_BACKEND_REQ)
    near, far = sockets.socketpair()
    far.sendmsg([b"x"], [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", [c.socket.fileno()]))])
    c.message(SET_BACKEND_REQ_FD, fds=[near.fileno()])
    for end in (near, far, c.socket):
        end.close()
    gone(shared)


def test_two_connections_that_hold_each_other_as_back_end_channel(c, shared):
    """Two connections, each of which hands over the other's end."""
    shared.daemon.cli("disk", "add", "name=dx,format=null,size=1M")
    socket = shared.rig.dir / "other.sock"
    shared.daemon.cli("export", "add", f"type=vhost-user-blk,name=other,disk=dx,socket={socket}")
    other = p.Peer(socket)
    for one in (c, other):
        opened(one, PF_BACKEND_REQ)
    for one, two in ((c, other), (other, c)):
        try:
            one.message(SET_BACKEND_REQ_FD, fds=[two.socket.fileno()])
        except p.Closed:
            pass
    other.socket.close()
    c.socket.close()
    gone(shared)
    r.wait_for("the other export is free", lambda: shared.daemon.cli("export", "remove", "other", check=False).returncode == 0)
    shared.daemon.cli("disk", "remove", "dx")


def test_a_removal_by_force_says_what_it_did(shared):
    shared.daemon.cli("disk", "add", "name=dx,format=null,size=1M")
    socket = shared.rig.dir / "other.sock"
    shared.daemon.cli("export", "add", f"type=vhost-user-blk,name=other,disk=dx,socket={socket}")
    with p.Peer(socket) as c:
        c.handshake()
        done = shared.daemon.cli("export", "remove", "other", "--force")
        r.require("other" in done.stdout and "disconnected" in done.stdout, f"--force says {done.stdout!r}")
    shared.daemon.cli("disk", "remove", "dx")


def test_another_exports_verified_load_was_unharmed(served):
    served.unharmed()
