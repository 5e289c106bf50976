"""Tests guests that send wrong frames and rings.

A wrong frame is dropped and counted. A wrong ring breaks, and the log has the reason. The other
pair continues.
"""

import struct

import net_frames as f
import net_peer as c
import net_rig as n
import peer as p
import pytest
import rig as r

FRAME = 1000
TCP4 = 1
WAITING = 40


class Hostile:
    def __init__(self, rig):
        self.rig = rig
        self.daemon = n.Net(rig, "hostile", pairs=2)
        self.number = 0

    def nic(self, features=c.MRG_RXBUF | c.MQ | c.CSUM | c.HOST_TSO4):
        nic = c.Nic(self.daemon.socket, features, pairs=2)
        return nic, f.Host("vs0")

    def passes(self, nic, host, pair):
        """A frame from the guest on this pair comes."""
        self.number += 1
        nic.transmit(f.frame(self.number, FRAME, f.HOST_MAC, f.GUEST_MAC), pair=pair)
        got = host.receive()
        r.require(got is not None, f"a frame on pair {pair} does not come")
        f.check(got, self.number, FRAME, f.HOST_MAC, f.GUEST_MAC)

    def dropped(self, why, attack, count=1):
        """Frames that `attack(nic)` sends on pair 0 are dropped for this reason.

        Both pairs continue.
        """
        nic, host = self.nic()
        with nic:
            before = self.daemon.counters()[0]["drops"][why]
            attack(nic)
            after = self.daemon.counters()[0]["drops"][why]
            r.require(after - before == count, f"{after - before} dropped as {why}, not {count}: {self.daemon.drops()}")
            for pair in (0, 1):
                self.passes(nic, host, pair)
        host.close()

    def broken(self, ring, attack, *words):
        """`attack(nic)` breaks this ring, and the log has the reason. Pair 1 continues, and the next guest is served."""
        nic, host = self.nic()
        with nic:
            seen = len(self.daemon.child.output())
            attack(nic)
            r.require(nic.rings[ring].broken(), "the front end is not told of an error")

            def told():
                said = self.daemon.child.output()[seen:]
                return all(word in said for word in words)

            r.wait_for(f"the log says {words}", told)
            states = {index: q["state"] for index, q in self.daemon.queues().items()}
            r.require(states == {0: "broken", 1: "running"}, f"{states}")
            self.passes(nic, host, 1)
        host.close()
        nic, host = self.nic()
        with nic:
            for pair in (0, 1):
                self.passes(nic, host, pair)
        host.close()


def chain(segs):
    """An attack: a chain of such (address, bytes, flags) on pair 0's transmit ring, which comes back."""

    def attack(nic):
        ring = nic.rings[1]
        at = ring.room(200_000)
        ring.add([(at + a if a < c.MEMORY else a, length, flags) for a, length, flags in segs])
        ring.publish()
        r.require(ring.pop(r.WAIT_S) is not None, "the chain does not come back")

    return attack


def garbage(head, length=FRAME):
    """An attack: a frame behind this header."""
    return lambda nic: nic.transmit(f.frame(1, length, f.HOST_MAC, f.GUEST_MAC), header=head)


def looped(number):
    """An attack: a chain whose end leads to its beginning."""

    def attack(nic):
        ring = nic.rings[number]
        flags = c.WRITE if number % 2 == 0 else 0
        ring.add([(ring.room(100), 100, flags), (ring.room(100), 100, flags)], last=c.NEXT)
        ring.publish()
        r.require(number % 2 == 0 or ring.pop(r.WAIT_S) is not None, "the chain does not come back")

    return attack


def head_outside(nic):
    ring = nic.rings[1]
    ring.make_available(ring.size + 5)
    ring.publish()


def too_many(nic):
    ring = nic.rings[1]
    ring.offered += ring.size + 1
    ring.publish()


def receive_buffer(address, length, flags):
    """An attack: such a receive buffer on pair 0."""

    def attack(nic):
        ring = nic.rings[0]
        ring.add([(ring.room(4096) if address is None else address, length, flags)])
        ring.publish()

    return attack


FAR = c.MEMORY + (1 << 30)
TSO = {"flags": f.NEEDS_CSUM, "gso": TCP4, "csum_start": 34, "csum_offset": 16}
# What a guest sends: the reason for the drop, and the attack.
DROPPED = {
    "outside-of-memory": ("malformed", chain([(FAR, FRAME, 0)])),
    "ends-outside-of-memory": ("malformed", chain([(c.MEMORY - 100, FRAME, 0)])),
    "a-piece-of-a-header": ("too-short", chain([(0, 8, 0)])),
    "a-header-alone": ("too-short", chain([(0, c.HEADER, 0)])),
    "a-header-and-13-bytes": ("too-short", chain([(0, 5, 0), (5, 7, 0), (12, 13, 0)])),
    "70000-bytes": ("too-long", chain([(0, c.HEADER + 70_000, 0)])),
    "70000-bytes-in-pieces": ("too-long", chain([(7000 * k, 7000, 0) for k in range(11)])),
    "a-chain-without-end": ("malformed", looped(1)),
    "unknown-kind-of-segments": ("bad-header", garbage(f.header(gso=0x7F, gso_size=100))),
    "segments-of-no-bytes": ("bad-header", garbage(f.header(hdr_len=54, gso_size=0, **TSO))),
    "headers-longer-than-the-frame": ("bad-header", garbage(f.header(hdr_len=9000, gso_size=500, **TSO))),
    "a-checksum-behind-the-frame": ("bad-header", garbage(f.header(flags=f.NEEDS_CSUM, csum_start=FRAME, csum_offset=16))),
}
UNUSABLE = "a receive buffer is unusable"
# The ring that is broken, the attack, and words of the reason.
BROKEN = {
    "a-head-that-does-not-exist": (1, head_outside, "c0"),
    "more-requests-than-the-ring-has": (1, too_many, "c0"),
    "a-receive-chain-without-end": (0, looped(0), "c0"),
    "a-receive-buffer-outside-of-memory": (0, receive_buffer(FAR, 2048, c.WRITE), UNUSABLE),
    "a-receive-buffer-that-is-read-only": (0, receive_buffer(None, 2048, 0), UNUSABLE),
    "a-receive-buffer-shorter-than-a-header": (0, receive_buffer(None, 8, c.WRITE), UNUSABLE),
}


@pytest.fixture(scope="module")
def hostile(rig):
    made = Hostile(rig)
    with made.daemon:
        yield made


@pytest.mark.parametrize("attack", DROPPED)
def test_a_wrong_frame_is_dropped_and_counted(hostile, attack):
    hostile.dropped(*DROPPED[attack])


@pytest.mark.parametrize("attack", BROKEN)
def test_a_ring_is_broken_with_its_reason(hostile, attack):
    hostile.broken(*BROKEN[attack])


def test_rings_are_switched_before_features_are_chosen(hostile):
    """As QEMU does. Without protocol features there is no such message."""
    with p.Peer(hostile.daemon.socket) as peer:
        protocol = struct.unpack("<Q", peer.request(p.GET_PROTOCOL_FEATURES))[0]
        peer.message(p.SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol & (p.PF_MQ | p.PF_REPLY_ACK)))
        for ring in range(4):
            answer = peer.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, int(ring < 2)))
            r.require(answer == p.ACCEPTED, f"ring {ring}: {answer}")
        # Ring 4 is the control queue.
        r.require(peer.order(p.SET_VRING_ENABLE, struct.pack("<II", 5, 1)) == p.REFUSED, "a ring that is not there is taken")
    with p.Peer(hostile.daemon.socket) as peer:
        peer.message(p.SET_VRING_ENABLE, struct.pack("<II", 0, 1))
        r.require(peer.closed(), "the connection continues")


def test_frames_while_the_interface_is_down(hostile):
    """They are dropped and counted."""
    n.ip("link", "set", "vs0", "down")
    try:
        nic, _ = hostile.nic()
        with nic:
            nic.transmit(f.frame(1, FRAME, f.HOST_MAC, f.GUEST_MAC))
            drops = hostile.daemon.counters()[0]["drops"]
            r.require(drops["down"] == 1, f"{drops}")
    finally:
        n.ip("link", "set", "vs0", "up")
    hostile.dropped("malformed", chain([(c.MEMORY - 100, FRAME, 0)]))


def test_descriptors_marked_as_writable_are_read(hostile):
    """DPDK's virtio-user marks the header as writable for the device. On a transmit ring the flag has no meaning."""
    nic, host = hostile.nic()
    with nic:
        for first, second in ((c.WRITE, 0), (0, c.WRITE), (c.WRITE, c.WRITE)):
            hostile.number += 1
            data = bytes(c.HEADER) + f.frame(hostile.number, FRAME, f.HOST_MAC, f.GUEST_MAC)
            ring = nic.rings[1]
            at = ring.room(len(data))
            nic.ram[at : at + len(data)] = data
            ring.add([(at, c.HEADER, first), (at + c.HEADER, FRAME, second)])
            ring.publish()
            got = host.receive()
            r.require(got is not None, f"the frame with flags {first}, {second} does not come")
            f.check(got, hostile.number, FRAME, f.HOST_MAC, f.GUEST_MAC)
            r.require(ring.pop(r.WAIT_S) is not None, "the chain does not come back")
    host.close()


def test_frames_that_wait_when_their_pair_is_switched_off_are_counted(hostile):
    """They wait in the queue of the tap, as the guest has no receive buffers."""
    nic, host = hostile.nic()
    with nic:
        before = hostile.daemon.drops().get("detached", 0)
        for number in range(WAITING):
            host.send(f.frame(number, FRAME, f.GUEST_MAC, f.HOST_MAC))
        for ring in range(4):
            answer = nic.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, 0))
            r.require(answer == p.ACCEPTED, f"ring {ring}: {answer}")
        counted = hostile.daemon.drops().get("detached", 0) - before
        # The host may have had something to say by itself.
        r.require(WAITING <= counted <= WAITING + 10, f"{counted} of {WAITING} frames that waited are counted: {hostile.daemon.drops()}")
    host.close()
    hostile.dropped("malformed", chain([(c.MEMORY - 100, FRAME, 0)]))


def test_what_a_guest_sends_on_a_pair_that_is_switched_off_comes_back(hostile):
    """Linux sends a little more on a pair after it has asked for fewer."""
    nic, host = hostile.nic()
    with nic:
        hostile.passes(nic, host, 1)
        for ring in (2, 3):
            nic.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, 0))
        states = {index: q["state"] for index, q in hostile.daemon.queues().items()}
        r.require(states == {0: "running", 1: "stopped"}, f"{states}")
        before = hostile.daemon.drops().get("detached", 0)
        worker = hostile.daemon.worker_new()
        for number in range(3):
            nic.transmit(f.frame(90 + number, FRAME, f.HOST_MAC, f.GUEST_MAC), pair=1)
            hostile.daemon.cli("attach", "c0:1", worker)
        r.require(host.receive(wait_s=0.2) is None, "a frame of a pair that is switched off comes")
        counted = hostile.daemon.drops().get("detached", 0) - before
        r.require(counted == 3, f"{counted} of 3 frames are counted: {hostile.daemon.drops()}")
        hostile.passes(nic, host, 0)
        for ring in (2, 3):
            nic.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, 1))
        hostile.passes(nic, host, 1)
        for ring in (2, 3):
            nic.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, 0))
        # The memory of the first two rings only.
        for length in (2 * c.PLACE, c.MEMORY):
            answer = nic.table([(p.GUEST, length, p.USER, 0)], [nic.fds[0]])
            r.require(answer == p.ACCEPTED, f"a table of {length} bytes: {answer}")
        nic.transmit(f.frame(94, FRAME, f.HOST_MAC, f.GUEST_MAC), pair=1)
        for ring in (2, 3):
            nic.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, 1))
        hostile.passes(nic, host, 1)
        # The front end gives such a ring to another program: the base counts what was discarded.
        nic.order(p.SET_VRING_ENABLE, struct.pack("<II", 3, 0))
        nic.transmit(f.frame(96, FRAME, f.HOST_MAC, f.GUEST_MAC), pair=1)
        nic.message(p.GET_VRING_BASE, struct.pack("<II", 3, 0))
        base = struct.unpack("<II", nic.reply())[1]
        r.require(base == nic.rings[3].offered, f"the base is {base}, and {nic.rings[3].offered} frames were sent")
    host.close()


def test_features_without_protocol_features_enable_a_ring_that_is_switched_off(hostile):
    nic, host = hostile.nic()
    with nic:
        nic.order(p.SET_VRING_ENABLE, struct.pack("<II", 3, 0))
        answer = nic.u64(p.SET_FEATURES, p.F_VERSION_1 | nic.features)
        r.require(answer == p.ACCEPTED, f"features: {answer}")
        ring = nic.rings[3]
        nic.addresses(3, p.USER + ring.desc, p.USER + ring.used_at, p.USER + ring.avail)
        hostile.passes(nic, host, 1)
    host.close()


def test_the_tap_is_removed_at_the_end(hostile):
    hostile.daemon.end()
