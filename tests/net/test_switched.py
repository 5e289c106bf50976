"""Tests a switch between two NICs in Python, so that the test chooses each header and buffer.

The cases are the header that one guest sends and the one that the other receives, wrong headers,
guests with few buffers or none, and requests of a front end.
"""

import struct
from pathlib import Path

import net_frames as f
import net_offload as o
import net_peer as c
import net_rig as n
import peer as p
import pytest
import rig as r
from net_rig import A_MAC, B_MAC

GET_INFLIGHT_FD, PF_INFLIGHT = 31, 1 << 12
# Flag: the checksum was found right.
DATA_VALID = 2
ALL = c.CSUM | c.GUEST_CSUM | c.HOST_TSO4 | c.GUEST_TSO4 | c.HOST_TSO6 | c.GUEST_TSO6


@pytest.fixture(scope="module")
def two(rig):
    made = n.Two(rig)
    yield made
    made.child.kill()


@pytest.mark.parametrize("takes", (True, False), ids=("taken-whole", "cut"))
@pytest.mark.parametrize("kind", o.KINDS, ids=o.NAMES)
def test_super_frames(two, kind, takes):
    """They come whole to a guest that takes them, else cut with right sums."""
    a, b = two.nics(c.CSUM | kind.host, c.GUEST_CSUM | kind.guest if takes else 0)
    with a, b:
        for size in o.SIZES:
            data = o.payload(size)
            frame = kind.frame(B_MAC, A_MAC, data)
            b.fill(120 - len(b.rings[0].chains), 2048)
            head = kind.header(o.MSS if size > o.MSS else 0)
            a.transmit(frame, head, cuts=(5, 40))
            frames, got = [], 0
            while got < size:
                taken = b.take()
                r.require(taken is not None, f"{kind.name}: {got} of {size} bytes come")
                frames.append(taken[1])
                got += len(taken[1]) - kind.headers
                want = head[:10] if takes else bytes(10)
                r.require(taken[0][:10] == want, f"{kind.name}, {size} bytes: a header {taken[0].hex()}")
            if takes:
                r.require(frames == [frame], f"{kind.name}, {size} bytes: other than it was sent")
            else:
                kind.check(frames, data)


def test_no_frame_makes_the_daemon_large(rig):
    """A header by which one frame would be cut into a gigabyte."""
    # Its headers alone are longer than a usual MTU.
    two = n.Two(rig, "bomb", mtu=65_521)
    start, frame = 32_768, bytearray(65_000)
    frame[:14] = B_MAC + A_MAC + b"\x86\xdd"
    frame[14], frame[start + 12] = 0x60, 0x50
    a, b = two.nics(ALL)
    with a, b:
        b.fill(100, 2048)
        before = two.drops(0).get("bad-header", 0)
        for gso_size in (1, 100):
            a.transmit(bytes(frame), f.header(f.NEEDS_CSUM, o.TCP6, 0, gso_size, start, 16))
        r.require(two.drops(0).get("bad-header", 0) == before + 2, f"{two.drops(0)}")
        with open(f"/proc/{two.child.pid}/status") as status:
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        r.require(peak < 200_000, f"the daemon had {peak} KiB")
        two.passes(a, b, 1)
    r.require(two.child.stop() == 0, two.child.tail())


def test_a_valid_checksum_is_not_passed_on(two):
    """One guest's statement that a checksum is right means nothing to another guest."""
    a, b = two.nics(ALL, ALL)
    with a, b:
        b.fill(4, 2048)
        a.transmit(f.frame(2, 600, B_MAC, A_MAC), f.header(flags=DATA_VALID))
        seen = b.take()
        r.require(seen is not None and seen[0][:10] == bytes(10), f"{seen and seen[0].hex()}")


def test_headers_that_make_no_sense(two):
    """They are not passed on."""
    a, b = two.nics(ALL, ALL)
    with a, b:
        b.fill(4, 2048)
        for bad in (
            f.header(gso=0x7F, gso_size=100),
            f.header(flags=f.NEEDS_CSUM, gso=o.TCP4, gso_size=0, csum_start=34, csum_offset=16),
            f.header(flags=f.NEEDS_CSUM, csum_start=600, csum_offset=16),
        ):
            before = two.drops(0).get("bad-header", 0)
            a.transmit(f.frame(3, 600, B_MAC, A_MAC), bad)
            r.require(two.drops(0).get("bad-header", 0) == before + 1, f"{two.drops(0)}")
        two.passes(a, b, 4)


def test_a_frame_larger_than_the_receivers_ring(two):
    """It is lost. The frames behind it are not."""
    a, b = two.nics(c.CSUM | c.HOST_TSO4, c.GUEST_CSUM | c.GUEST_TSO4, size=8)
    with a, b:
        kind = o.KINDS[0]
        b.fill(8, 2048)
        a.transmit(kind.frame(B_MAC, A_MAC, o.payload(40_000)), kind.header())
        two.passes(a, b, 6)
        r.require(two.drops(1) == {"too-long": 1}, f"{two.drops(1)}")


def test_requests_end_in_the_rings_order(two):
    """A request that waits for a guest's buffers ends before later ones that need not wait."""
    a, b = two.nics()
    with a, b:
        ring, heads = a.rings[1], []
        b.fill(1, 2048)
        # To a guest with room for one, then to nobody.
        for data in (f.frame(7, 600, B_MAC, A_MAC), f.frame(8, 600, B_MAC, A_MAC), b"\0" * 13):
            data = bytes(c.HEADER) + data
            at = ring.room(len(data))
            a.ram[at : at + len(data)] = data
            heads.append(ring.add([(at, len(data), 0)]))
        ring.publish()
        for head in heads:
            number = ring.taken % ring.size
            r.require(ring.pop(r.WAIT_S) is not None, "a request does not come back")
            used = struct.unpack_from("<I", a.ram, ring.used_at + 4 + 8 * number)[0]
            r.require(used == head, f"head {used} before {head}")
        r.require(b.take() is not None, "the first frame does not come")


def test_a_transmit_ring_that_is_switched_off_keeps_nothing(two):
    """Its frames are dropped, not sent some time later."""
    a, b = two.nics()
    with a, b:
        b.fill(4, 2048)
        two.passes(a, b, 9)
        # Shown without a kick, to a worker that sleeps.
        n.asleep(two)
        ring = a.rings[1]
        data = bytes(c.HEADER) + f.frame(10, 600, B_MAC, A_MAC)
        at = ring.room(len(data))
        a.ram[at : at + len(data)] = data
        ring.add([(at, len(data), 0)])
        struct.pack_into("<H", a.ram, ring.avail + 2, ring.offered)
        before = two.drops(0).get("detached", 0)
        a.order(p.SET_VRING_ENABLE, struct.pack("<II", 1, 0))
        r.require(ring.pop(r.WAIT_S) is not None, "the frame is kept")
        r.require(two.drops(0).get("detached", 0) == before + 1, f"{two.drops(0)}")
        sent_while_off(two, a, ring)
        a.order(p.SET_VRING_ENABLE, struct.pack("<II", 1, 1))
        two.passes(a, b, 11)


def sent_while_off(two, nic, ring):
    """Frames on a transmit ring that is switched off come back and go nowhere, and it can be set up again."""
    before = two.drops(0).get("detached", 0)
    for number in range(3):
        data = bytes(c.HEADER) + f.frame(50 + number, 600, B_MAC, A_MAC)
        at = ring.room(len(data))
        nic.ram[at : at + len(data)] = data
        ring.add([(at, len(data), 0)])
        ring.publish()
        r.require(ring.pop(r.WAIT_S) is not None, f"frame {number} is kept")
    r.require(two.drops(0).get("detached", 0) == before + 3, f"{two.drops(0)}")
    # Once more says nothing new.
    nic.order(p.SET_VRING_ENABLE, struct.pack("<II", ring.index, 0))
    answer = nic.order(p.SET_VRING_BASE, struct.pack("<II", ring.index, ring.offered))
    r.require(answer == p.ACCEPTED, f"a base: {answer}")


def test_transmit_follows_receive(rig):
    """A flow arrives on the pair on which its guest last sent it, whatever its hash, and moves with it."""
    daemon, sockets = n.joined(rig, "follows")
    try:
        with c.Nic(sockets[0], c.MRG_RXBUF) as a, c.Nic(sockets[1], c.MRG_RXBUF | c.MQ, pairs=2) as b:
            a.fill(100, 2048)
            for pair in range(2):
                b.fill(100, 2048, pair=pair)
            flows = [(A_MAC[:5] + bytes([k]), k % 2) for k in range(12)]
            for turn in range(3):
                for k, (mac, pair) in enumerate(flows):
                    number, pair = turn * len(flows) + k, (pair + turn) % 2
                    b.transmit(f.frame(number, 200, B_MAC, mac), pair=pair)
                    r.require(a.take() is not None, "a frame of the flow does not come out")
                    a.transmit(f.frame(number, 600, mac, B_MAC))
                    got = b.take(pair)
                    r.require(got is not None, f"turn {turn}: the flow of {mac.hex()} does not come in by pair {pair}")
                    f.check(got[1], number, 600, mac, B_MAC)
        r.require(daemon.child.stop() == 0, daemon.child.tail())
    finally:
        daemon.child.kill()


def test_engine_auto_gives_the_reason(rig):
    daemon, _ = n.joined(rig, "auto")
    try:
        daemon.cli("export", "add", f"type=vhost-user-net,name=c2,net=s0,socket={rig.dir}/auto2.sock,engine=auto")
        export = next(e for e in daemon.status()["exports"] if e["name"] == "c2")
        r.require((export["engine"], export.get("engine-reason")) == ("user", "the kernel cannot serve a port of a switch"), f"{export}")
        r.require(daemon.child.stop() == 0, daemon.child.tail())
    finally:
        daemon.child.kill()


def test_requests_of_a_front_end(two):
    """The configuration space, NET_SET_MTU, and SEND_RARP, from which the switch learns where a guest is."""
    with p.Peer(two.sockets[0]) as peer:
        peer.handshake()

        def config():
            answer = peer.request(p.GET_CONFIG, struct.pack("<III", 0, 12, 0) + bytes(12))[12:]
            return answer[:6], struct.unpack("<HHH", answer[6:12])

        want = bytes.fromhex(n.MAC.replace(":", ""))
        r.require(config() == (want, (1, 1, 1500)), f"{config()}")
        r.require(peer.u64(p.NET_SET_MTU, 1400) == p.ACCEPTED and config()[1][2] == 1400, f"{config()}")
        # No more than the export's mtu, and no less than IP has.
        for wrong in (1501, 9000, 60):
            r.require(peer.u64(p.NET_SET_MTU, wrong) == p.REFUSED and config()[1][2] == 1400, f"{wrong}: {config()}")
        r.require(peer.u64(p.NET_SET_MTU, 1500) == p.ACCEPTED, "the export's own MTU is refused")
        before = two.status()["nets"][0]["addresses"]
        peer.order(p.SEND_RARP, bytes.fromhex("525400000077") + bytes(2))
        after = two.status()["nets"][0]["addresses"]
        r.require(after == before + 1, f"{before} addresses, then {after}")
        r.require(peer.u64(p.NET_SET_MTU, 68) == p.ACCEPTED and config()[1][2] == 68, f"{config()}")
    with p.Peer(two.sockets[0]) as peer:
        peer.handshake()
        r.require(config() == (want, (1, 1, 1500)), f"the next front end has what a former one set: {config()}")


def test_a_front_end_that_leaves_holds_nothing(two):
    """The in-flight region of a front end that disconnects is unmapped."""

    def mapped():
        return Path(f"/proc/{two.child.pid}/maps").read_text().count("memfd:vshunt-inflight")

    with p.Peer(two.sockets[0]) as peer:
        peer.handshake(c.CTRL_VQ)
        peer.message(p.SET_PROTOCOL_FEATURES, struct.pack("<Q", p.PF_MQ | p.PF_REPLY_ACK | PF_INFLIGHT))
        peer.request(GET_INFLIGHT_FD, struct.pack("<QQHHI", 0, 0, 2, 16, 0))
        r.require(mapped() == 1, f"{mapped()} in-flight regions are mapped")
    r.wait_for("the region is let go of", lambda: mapped() == 0)


def test_end(two):
    r.require(two.child.stop() == 0, two.child.tail())
