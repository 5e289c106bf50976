"""Tests ports of a switch that do not trust each other.

The cases are source addresses, VLANs, lengths, and frames that change while they wait. NICs are
in Python (net_peer), so that a test chooses each byte. A test sees that a frame was dropped when
the next frame of the same sender arrives, because frames of one sender keep their order.
"""

import json
import struct
import time

import net_frames as f
import net_offload as o
import net_peer as c
import pytest
import rig as r
from net_ports import ALL, EVIL, A, B, C, D, Net, got, got_tagged, nothing, passes, tag, text


def test_only_its_own_address_leaves_an_export(rig):
    """No port takes over the address of another one."""
    with Net(rig, "sources", f"mac={text(A)}", "", f"mac={text(C)},mac-filter=off") as net:
        a, b, cc = net.all_nics()
        # It is known before its guest has said a word, and only there.
        passes(b, B, a, A)
        nothing(net, b, B, a, cc)
        net.refused("foreign-source", 1, "c1", lambda: b.transmit(f.frame(2, 200, ALL, A)))
        net.refused("foreign-source", 1, "c2", lambda: cc.transmit(f.frame(2, 200, ALL, A)))
        net.refused("foreign-source", 1, "c0", lambda: a.transmit(f.frame(2, 200, ALL, EVIL)))
        passes(cc, EVIL, b, B)
        passes(b, B, a, A)
        nothing(net, b, B, a, cc)
        # Filters are shown as they are.
        shown = [net.port(f"c{k}")["mac-filter"] for k in range(3)]
        r.require(shown == [True, False, False], f"{shown}")
        refused = net.cli("export", "add", f"type=vhost-user-net,name=c9,net=s0,socket={rig.dir}/c9.sock,mac={text(A)}", check=False)
        r.message_of(refused, "its mac is that of export c0", "a mac of its own")
        listed = net.cli("status").stdout
        r.require("mac-filter" in listed and "LEARNT" in listed and "foreign-source" in listed, listed)


def test_a_guest_with_many_addresses(rig):
    """A guest with many addresses replaces only its own entries of the MAC table."""
    with Net(rig, "stations", "", "mac-limit=4", "") as net:
        a, b, cc = net.all_nics()
        cc.transmit(f.frame(1, 100, C, C))
        a.transmit(f.frame(1, 100, A, A))
        for k in range(300):
            b.transmit(f.frame(k, 100, A, bytes.fromhex("5254000100") + bytes([k % 256])))
            got(a, "a frame to a known address")
        port = net.port("c1")
        r.require((port["addresses"], port["mac-limit"]) == (4, 4), f"{port}")
        # The last one is known, and so are the others' stations.
        passes(a, A, b, bytes.fromhex("5254000100") + bytes([299 % 256]))
        passes(b, B, cc, C)
        nothing(net, a, A, b, cc)


def test_frames_for_bridges_and_with_bad_senders(rig):
    """They do not pass. An option lets those for bridges pass."""
    with Net(rig, "reserved", "", "", "reserved=on", "reserved=on") as net:
        a, b, cc, d = net.all_nics()
        bridges = bytes.fromhex("0180c20000")
        net.refused("reserved", 16, "c0", lambda: [a.transmit(f.frame(1, 100, bridges + bytes([k]), A)) for k in range(16)])
        for bad in (bytes(6), ALL, bytes.fromhex("010000000001")):
            net.refused("bad-source", 1, "c0", lambda source=bad: a.transmit(f.frame(1, 100, ALL, source)))
        nothing(net, a, A, b, cc, d)
        for k in (0, 2, 15):
            passes(cc, C, d, bridges + bytes([k]))
        # One beyond is a group like any other.
        frame = f.frame(2, 100, bridges + b"\x10", C)
        cc.transmit(frame)
        for nic in (a, b, d):
            r.require(got(nic, "a group's frame") == frame, "another frame came")


def test_vlans(rig):
    """Access ports and trunks: tags added and removed, learning for each VLAN, and no port chooses the VLAN of another one."""
    with Net(rig, "vlans", "vlan=5", "vlan=5", "vlan=6", "trunk=5,,6", "") as net:
        a, b, cc, trunk, plain = net.all_nics()
        frame = f.frame(1, 200, ALL, A)
        a.transmit(frame)
        r.require(got(b, "VLAN 5's frame") == frame, "it is changed")
        r.require(got_tagged(trunk, "VLAN 5's frame") == tag(frame, 5), "the trunk's has not its tag")
        # The same station in another VLAN is another one.
        trunk.transmit(tag(f.frame(2, 200, ALL, A), 6))
        r.require(got(cc, "VLAN 6's frame") == f.frame(2, 200, ALL, A), "the tag stays")
        passes(b, B, a, A)
        cc.transmit(f.frame(3, 200, A, C))
        r.require(got_tagged(trunk, "VLAN 6's frame") == tag(f.frame(3, 200, A, C), 6), "another frame came")
        listed = json.loads(net.cli("net", "addresses", "s0", "--json").stdout)
        known = [(text(B), 5, "c1"), (text(A), 5, "c0"), (text(C), 6, "c2"), (text(A), 6, "c3")]
        r.require(sorted((x["address"], x["vlan"], x["export"]) for x in listed) == sorted(known), f"{listed}")
        r.require(all(x["origin"] == "learnt" and x["age-s"] < 300 for x in listed), f"{listed}")
        shown = net.cli("net", "addresses", "s0").stdout.splitlines()
        r.require(len(shown) == 5 and shown[0].split() == ["ADDRESS", "VLAN", "PORT", "ORIGIN", "AGE"], f"{shown}")
        # Priority alone is no VLAN; an access port's guest may not choose one.
        b.transmit(tag(f.frame(4, 200, A, B), 0xE000))
        r.require(got(a, "a frame with a priority") == f.frame(4, 200, A, B), "the tag stays")
        for vlan, kind in ((5, 0x8100), (6, 0x8100), (5, 0x88A8), (0, 0x9100)):
            net.refused("vlan", 1, "c0", lambda v=vlan, k=kind: a.transmit(tag(f.frame(5, 200, ALL, A), v, k)))
        net.refused("vlan", 1, "c3", lambda: trunk.transmit(f.frame(5, 200, ALL, D)))
        net.refused("vlan", 1, "c3", lambda: trunk.transmit(tag(f.frame(5, 200, ALL, D), 7)))
        # A second tag does not come to be the first.
        net.refused("vlan", 1, "c3", lambda: trunk.transmit(tag(tag(f.frame(5, 200, B, D), 6), 5)))
        net.refused("no-receiver", 1, "c4", lambda: plain.transmit(f.frame(5, 200, ALL, D)))
        nothing(net, a, A, b)


@pytest.mark.parametrize("kind", o.KINDS, ids=o.NAMES)
def test_super_frames_with_tags_added_and_removed(rig, kind):
    """They come whole with offsets that fit, else cut with right sums."""
    with Net(rig, "tagged", "vlan=5", "trunk=5", "trunk=5", "vlan=5") as net:
        takes = c.GUEST_CSUM | kind.guest
        access, trunk = net.nic(0, c.CSUM | kind.host | takes), net.nic(1, c.CSUM | kind.host | takes)
        cutting, cutting_access = net.nic(2), net.nic(3)
        for size in (1, 700, 5 * o.MSS, 40_000):
            data, head = o.payload(size), kind.header(o.MSS if size > o.MSS else 0)
            flags, gso, hdr_len, gso_size, start, offset = struct.unpack("<BBHHHH", head[:10])
            moved = struct.pack("<BBHHHH", flags, gso, hdr_len and hdr_len + 4, gso_size, start + 4, offset)
            # Untagged to all: to a trunk that takes it, to one that does not, to an access port
            # that does not.
            frame = kind.frame(ALL, A, data)
            access.transmit(frame, head, cuts=(5, 40))
            seen = trunk.take()
            r.require(seen is not None and seen[1] == tag(frame, 5), f"{size} bytes: another frame")
            r.require(seen[0][:10] == moved, f"{size} bytes: a header {seen[0].hex()}, not {moved.hex()}")
            trunk.fill(seen[2], 2048)
            kind.check([untag(piece) for piece in pieces(cutting, kind, size, 4)], data)
            kind.check(pieces(cutting_access, kind, size, 0), data)
            # Tagged to all.
            trunk.transmit(tag(kind.frame(ALL, B, data), 5), moved + bytes(2), cuts=(5, 14, 16, 40))
            seen = access.take()
            r.require(seen is not None and seen[1] == kind.frame(ALL, B, data), f"{size} bytes: another frame")
            r.require(seen[0][:10] == head[:10], f"{size} bytes: a header {seen[0].hex()}, not {head.hex()}")
            access.fill(seen[2], 2048)
            kind.check([untag(piece) for piece in pieces(cutting, kind, size, 4)], data)
            kind.check(pieces(cutting_access, kind, size, 0), data)


def untag(frame):
    r.require(frame[12:16] == struct.pack(">HH", 0x8100, 5), f"no tag: {frame[:20].hex()}")
    return frame[:12] + frame[16:]


def pieces(nic, kind, size, more):
    """Frames with so many bytes of payload, `more` bytes longer each than without tags."""
    frames, have = [], 0
    while have < size:
        seen = nic.take()
        r.require(seen is not None, f"{kind.name}: {have} of {size} bytes come")
        r.require(seen[0][:10] == bytes(10), f"a header {seen[0].hex()} for a guest that takes none")
        nic.fill(seen[2], 2048)
        frames.append(seen[1])
        have += len(seen[1]) - kind.headers - more
    return frames


def test_isolated_ports(rig):
    """Isolated ports talk to others, not to each other."""
    with Net(rig, "isolated", "isolated=on", "isolated=on", "") as net:
        a, b, up = net.all_nics()
        for nic, mac in ((a, A), (b, B)):
            nic.transmit(f.frame(1, 100, ALL, mac))
            r.require(got(up, "a frame to the port that is not isolated") == f.frame(1, 100, ALL, mac), "another frame came")
        net.refused("isolated", 1, "c0", lambda: a.transmit(f.frame(2, 100, B, A)))
        passes(a, A, up, C)
        passes(up, C, a, A)
        nothing(net, up, C, a, b)


def test_frames_longer_than_an_mtu(rig):
    """None longer than the MTU of a port passes, and no segment of a super frame."""
    tso = o.KINDS[0]
    with Net(rig, "lengths", "mtu=1500", "mtu=1500", "mtu=9000", "") as net:
        a = net.nic(0, c.CSUM | tso.host)
        b, large, unset = net.nic(1, c.GUEST_CSUM | tso.guest), net.nic(2), net.nic(3)
        for length in (14, 60, 1514):
            passes(a, A, b, B, length=max(22, length))
            b.transmit(f.frame(1, 100, A, B))
        net.refused("over-mtu", 1, "c0", lambda: a.transmit(f.frame(2, 1515, B, A)))
        net.refused("over-mtu", 1, "c2", lambda: large.transmit(f.frame(2, 1515, B, C)))
        tagged = tag(f.frame(3, 1514, B, A), 5)
        a.transmit(tagged)
        r.require(got_tagged(b, "a frame with a tag") == tagged, "another frame came")
        net.refused("over-mtu", 1, "c0", lambda: a.transmit(tag(f.frame(3, 1515, B, A), 5)))
        for segment, fits in ((1460, True), (1461, False)):
            frame, head = tso.frame(B, A, o.payload(20_000)), tso.header(segment)
            if fits:
                a.transmit(frame, head)
                r.require(got_tagged(b, "a super frame") == frame, "another frame came")
                b.fill(10, 2048)
            else:
                net.refused("over-mtu", 1, "c0", lambda: a.transmit(frame, head))
        # What no MTU was given for has the one that its guest is told.
        r.require([net.port(f"c{k}")["mtu"] for k in range(4)] == [1500, 1500, 9000, 1500], f"{net.status()['exports']}")
        net.refused("over-mtu", 1, "c3", lambda: unset.transmit(f.frame(2, 1515, B, D)))


def test_a_checksum_within_the_addresses(rig):
    """A checksum is put behind addresses and tags, or the frame is dropped."""
    with Net(rig, "sums", f"mac={text(A)}", "", "trunk=5", "trunk=5") as net:
        a, b = net.nic(0, c.CSUM), net.nic(1)
        trunk, other = net.nic(2, c.CSUM), net.nic(3)
        for start, offset in ((0, 0), (6, 0), (8, 4), (13, 0)):
            head = f.header(f.NEEDS_CSUM, csum_start=start, csum_offset=offset)
            net.refused("bad-header", 1, "c0", lambda x=head: a.transmit(f.frame(1, 200, ALL, A), x))
        for start in (12, 14, 17):
            head = f.header(f.NEEDS_CSUM, csum_start=start, csum_offset=0)
            net.refused("bad-header", 1, "c2", lambda x=head: trunk.transmit(tag(f.frame(1, 200, ALL, C), 5), x))
        nothing(net, a, A, b)
        r.require(other.take(wait_s=0) is None, "a frame came")


def later(nic, data):
    """A frame is shown to the daemon; nobody waits for it. -> where it lies"""
    ring = nic.rings[1]
    while ring.has_used():
        ring.pop()
    at = ring.room(len(data))
    nic.ram[at : at + len(data)] = data
    ring.add([(at, len(data), 0)])
    ring.publish()
    return at


@pytest.mark.timed  # a frame waits for 10 to 20 ms, and is changed within that time
def test_a_frame_that_is_changed_while_it_waits(rig):
    """The frame that was checked is the one that comes."""
    with Net(rig, "changed", f"mac={text(A)},vlan=5", "trunk=5,,6", f"mac={text(B)}", "") as net:
        a, trunk, b, plain = net.nic(0), net.nic(1, buffers=0), net.nic(2), net.nic(3, buffers=0)
        cases = [
            # What the guest sends, what it writes over that, and where; what may come.
            (a, trunk, f.frame(1, 300, ALL, A), 6, EVIL, tag(f.frame(1, 300, ALL, A), 5)),
            (a, trunk, tag(f.frame(2, 300, ALL, A), 0), 14, b"\x00\x06", tag(f.frame(2, 300, ALL, A), 5)),
            (a, trunk, f.frame(3, 300, ALL, A), 12, b"\x81\x00\x00\x06", tag(f.frame(3, 300, ALL, A), 5)),
            (b, plain, f.frame(4, 300, ALL, B), 6, EVIL, f.frame(4, 300, ALL, B)),
        ]
        for sender, receiver, frame, where, over, want in cases:
            came, end, turn = 0, time.monotonic() + r.WAIT_S, 0
            while came < 5:
                if time.monotonic() > end:
                    raise r.Late(f"only {came} frames come in {turn} turns: {net.drops('c0')}")
                # One that finds a buffer does not wait, and does not count.
                waits = not receiver.rings[0].chains
                at = later(sender, bytes(c.HEADER) + frame)
                # So long that the daemon has seen it, mostly, and that it has not given up.
                time.sleep(0.001 * (1 + turn % 4))
                place = at + c.HEADER + where
                sender.ram[place : place + len(over)] = over
                if waits:
                    receiver.fill(1, 2048)
                turn += 1
                r.wait_for("the frame's end", lambda: sender.rings[1].has_used())
                while seen := receiver.take(wait_s=0.002):
                    r.require(seen[1][:22] == want[:22], f"a frame came that was changed: {seen[1][:26].hex()}")
                    came += waits
