"""Guests that lie: a counted drop, or a ring that is broken with its reason in the log. The other pair goes on."""

import struct

import net_frames as f
import net_peer as c
import net_rig as n
import peer as p
import rig as r

FRAME = 1000
TCP4 = 1
WAITING = 40
NEEDS_CSUM = 1


def header(flags=0, gso=0, hdr_len=0, gso_size=0, csum_start=0, csum_offset=0):
    """A virtio-net header (Virtio 1.3, 5.1.6)."""
    return struct.pack("<BBHHHHH", flags, gso, hdr_len, gso_size, csum_start, csum_offset, 0)


class Hostile:
    def __init__(self, rig):
        self.rig = rig
        self.daemon = n.Net(rig, "hostile", pairs=2)
        self.number = 0

    def card(self, features=c.MRG_RXBUF | c.MQ | c.CSUM | c.HOST_TSO4):
        card = c.Card(self.daemon.socket, features, pairs=2)
        return card, f.Host("vs0")

    def passes(self, card, host, pair):
        """A frame from the guest on this pair comes."""
        self.number += 1
        card.transmit(f.frame(self.number, FRAME, f.HOST_MAC, f.GUEST_MAC), pair=pair)
        got = host.receive()
        r.require(got is not None, f"a frame on pair {pair} does not come")
        f.check(got, self.number, FRAME, f.HOST_MAC, f.GUEST_MAC)

    def dropped(self, why, attack, count=1):
        """What `attack(card)` sends on pair 0 is dropped for this reason, and both pairs go on."""
        card, host = self.card()
        with card:
            before = self.daemon.counters()[0]["drops"][why]
            attack(card)
            after = self.daemon.counters()[0]["drops"][why]
            r.require(after - before == count, f"{after - before} dropped as {why}, not {count}: {self.daemon.drops()}")
            for pair in (0, 1):
                self.passes(card, host, pair)
        host.close()

    def broken(self, ring, attack, *words):
        """`attack(card)` breaks this ring, and says why in the log; pair 1 goes on, and so does the next guest."""
        card, host = self.card()
        with card:
            seen = len(self.daemon.child.output())
            attack(card)
            r.require(card.rings[ring].broken(), "the front-end is not told of an error")

            def told():
                said = self.daemon.child.output()[seen:]
                return all(word in said for word in words)

            r.wait_for(f"the log says {words}", told, timeout_s=20)
            states = {index: q["state"] for index, q in self.daemon.queues().items()}
            r.require(states == {0: "broken", 1: "running"}, f"{states}")
            self.passes(card, host, 1)
        host.close()
        card, host = self.card()
        with card:
            for pair in (0, 1):
                self.passes(card, host, pair)
        host.close()


def chain(segs):
    """An attack: a chain of such (address, bytes, flags) on pair 0's transmit ring, which comes back."""

    def attack(card):
        ring = card.rings[1]
        at = ring.room(200_000)
        ring.add([(at + a if a < c.MEMORY else a, length, flags) for a, length, flags in segs])
        ring.publish()
        r.require(ring.pop(r.WAIT_S) is not None, "the chain does not come back")

    return attack


def garbage(head, length=FRAME):
    """An attack: a frame behind this header."""
    return lambda card: card.transmit(f.frame(1, length, f.HOST_MAC, f.GUEST_MAC), header=head)


def looped(number):
    """An attack: a chain whose end leads to its beginning."""

    def attack(card):
        ring = card.rings[number]
        flags = c.WRITE if number % 2 == 0 else 0
        ring.add([(ring.room(100), 100, flags), (ring.room(100), 100, flags)], last=c.NEXT)
        ring.publish()
        r.require(number % 2 == 0 or ring.pop(r.WAIT_S) is not None, "the chain does not come back")

    return attack


def head_outside(card):
    ring = card.rings[1]
    ring.make_available(ring.size + 5)
    ring.publish()


def too_many(card):
    ring = card.rings[1]
    ring.offered += ring.size + 1
    ring.publish()


def receive_buffer(address, length, flags):
    """An attack: such a receive buffer on pair 0."""

    def attack(card):
        ring = card.rings[0]
        ring.add([(ring.room(4096) if address is None else address, length, flags)])
        ring.publish()

    return attack


def early(h):
    """QEMU switches rings before the guest has chosen features. Without protocol features there is no such message."""
    with p.Peer(h.daemon.socket) as peer:
        protocol = struct.unpack("<Q", peer.request(p.GET_PROTOCOL_FEATURES))[0]
        peer.message(p.SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol & (p.PF_MQ | p.PF_REPLY_ACK)))
        for ring in range(4):
            answer = peer.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, int(ring < 2)))
            r.require(answer == p.ACCEPTED, f"ring {ring}: {answer}")
        # Ring 4 is the control queue.
        r.require(peer.order(p.SET_VRING_ENABLE, struct.pack("<II", 5, 1)) == p.REFUSED, "a ring that is not there is taken")
    with p.Peer(h.daemon.socket) as peer:
        peer.message(p.SET_VRING_ENABLE, struct.pack("<II", 0, 1))
        r.require(peer.closed(), "the connection goes on")


def down(h):
    """Frames of a guest whose interface is down are dropped and counted."""
    n.ip("link", "set", "vs0", "down")
    try:
        card, _ = h.card()
        with card:
            card.transmit(f.frame(1, FRAME, f.HOST_MAC, f.GUEST_MAC))
            drops = h.daemon.counters()[0]["drops"]
            r.require(drops["down"] == 1, f"{drops}")
    finally:
        n.ip("link", "set", "vs0", "up")
    h.dropped("malformed", chain([(c.MEMORY - 100, FRAME, 0)]))


def marked(h):
    """DPDK's virtio-user marks a header as to be written by the device; on a ring that only sends it means nothing."""
    card, host = h.card()
    with card:
        for first, second in ((c.WRITE, 0), (0, c.WRITE), (c.WRITE, c.WRITE)):
            h.number += 1
            data = bytes(c.HEADER) + f.frame(h.number, FRAME, f.HOST_MAC, f.GUEST_MAC)
            ring = card.rings[1]
            at = ring.room(len(data))
            card.ram[at : at + len(data)] = data
            ring.add([(at, c.HEADER, first), (at + c.HEADER, FRAME, second)])
            ring.publish()
            got = host.receive()
            r.require(got is not None, f"the frame with flags {first}, {second} does not come")
            f.check(got, h.number, FRAME, f.HOST_MAC, f.GUEST_MAC)
            r.require(ring.pop(r.WAIT_S) is not None, "the chain does not come back")
    host.close()


def switched_off(h):
    """Frames that wait in a tap's queue, for want of receive buffers, when its pair is switched off: each is counted."""
    card, host = h.card()
    with card:
        before = h.daemon.drops().get("detached", 0)
        for number in range(WAITING):
            host.send(f.frame(number, FRAME, f.GUEST_MAC, f.HOST_MAC))
        for ring in range(4):
            answer = card.order(p.SET_VRING_ENABLE, struct.pack("<II", ring, 0))
            r.require(answer == p.ACCEPTED, f"ring {ring}: {answer}")
        counted = h.daemon.drops().get("detached", 0) - before
        # The host may have had something to say by itself.
        r.require(WAITING <= counted <= WAITING + 10, f"{counted} of {WAITING} frames that waited are counted: {h.daemon.drops()}")
    host.close()
    h.dropped("malformed", chain([(c.MEMORY - 100, FRAME, 0)]))


def tests(rig):
    h = Hostile(rig)
    far = c.MEMORY + (1 << 30)

    def drop(name, why, attack, count=1):
        rig.test(f"net: a guest sends {name}: dropped as {why}", lambda: h.dropped(why, attack, count))

    drop("what lies outside of its memory", "malformed", chain([(far, FRAME, 0)]))
    drop("what ends outside of its memory", "malformed", chain([(c.MEMORY - 100, FRAME, 0)]))
    rig.test("net: what a guest sends is read, whatever its descriptors say of writing", lambda: marked(h))
    drop("a piece of a header", "too-short", chain([(0, 8, 0)]))
    drop("a header alone", "too-short", chain([(0, c.HEADER, 0)]))
    drop("a header and 13 bytes", "too-short", chain([(0, 5, 0), (5, 7, 0), (12, 13, 0)]))
    drop("a frame of 70,000 bytes", "too-long", chain([(0, c.HEADER + 70_000, 0)]))
    drop("a frame of 70,000 bytes in pieces", "too-long", chain([(7000 * k, 7000, 0) for k in range(11)]))
    drop("a chain without an end", "malformed", looped(1))
    for name, head in {
        "an unknown kind of segments": header(gso=0x7F, gso_size=100),
        "segments of no bytes": header(flags=NEEDS_CSUM, gso=TCP4, hdr_len=54, gso_size=0, csum_start=34, csum_offset=16),
        "headers longer than the frame": header(flags=NEEDS_CSUM, gso=TCP4, hdr_len=9000, gso_size=500, csum_start=34, csum_offset=16),
        "a checksum behind the frame": header(flags=NEEDS_CSUM, csum_start=FRAME, csum_offset=16),
    }.items():
        drop(f"a header with {name}", "bad-header", garbage(head))

    def break_ring(name, ring, attack, *words):
        rig.test(f"net: {name}: its ring is broken, with the reason", lambda: h.broken(ring, attack, *words))

    break_ring("a head that is not there", 1, head_outside, "c0")
    break_ring("more requests than the ring has", 1, too_many, "c0")
    unusable = "a receive buffer is unusable"
    break_ring("a receive chain without an end", 0, looped(0), "c0")
    break_ring("a receive buffer outside of memory", 0, receive_buffer(far, 2048, c.WRITE), unusable)
    break_ring("a receive buffer that may only be read", 0, receive_buffer(None, 2048, 0), unusable)
    break_ring("a receive buffer shorter than a header", 0, receive_buffer(None, 8, c.WRITE), unusable)
    rig.test("net: rings are switched before features are chosen", lambda: early(h))
    rig.test("net: frames that wait when their pair is switched off are counted", lambda: switched_off(h))
    rig.test("net: frames while the interface is down", lambda: down(h))
    rig.test("net: nothing is left after bad guests", h.daemon.end)
