"""Tests segmentation and checksums: super frames from and to the guest.

They stay whole if both sides accept them. Otherwise they are segmented, with correct checksums.
From the guest they pass a bridge to a link without offloads, where the kernel has to segment them
and compute checksums. The frames that leave its far end are checked. To the guest they come from
a packet socket with a virtio-net header, as a network stack sends them.
"""

import struct

import net_frames as f
import net_offload as o
import net_peer as c
import net_rig as n
import peer as p
import pytest
import rig as r


@pytest.fixture(scope="module", params=("tap", "uplink"))
def daemon(request, rig):
    """A network device on a tap, or on a switch with the tap as its uplink."""
    if request.param == "tap":
        with n.Net(rig, "offload", pairs=1, mtu=1500) as made:
            yield made
    else:
        with n.Up(rig, "offload-up") as made:
            yield made
            r.require(made.child.stop() == 0, made.child.tail())


@pytest.fixture(scope="module")
def bridge(daemon):
    """The tap and a link without offloads on a bridge."""
    ethtool = r.tool("ethtool", "ethtool")
    n.ip("link", "add", "ve0", "type", "veth", "peer", "name", "ve1")
    n.ip("link", "add", "br0", "type", "bridge")
    r.run([ethtool, "-K", "ve0", "tx", "off"])
    for name in ("vs0", "ve0"):
        n.ip("link", "set", name, "master", "br0")
    for name in ("ve0", "ve1", "br0"):
        n.ip("link", "set", name, "mtu", "1500", "up")
    yield
    n.ip("link", "del", "br0")
    n.ip("link", "del", "ve0")


def test_bridge_to_a_link_without_offloads(bridge):
    shown = r.run([r.tool("ethtool", "ethtool"), "-k", "ve0"]).stdout
    r.require("tx-tcp-segmentation: off" in shown and "tx-checksum-ip-generic: off" in shown, shown)


def uso(daemon, kind):
    """Leaves the test out if the kernel's taps lack UDP segmentation."""
    if kind.udp:
        with p.Peer(daemon.socket) as peer:
            peer.handshake()
            if not peer.offered & kind.host:
                raise r.Skipped("this kernel's taps have no UDP segmentation")


def pieces(host, source, kind, size):
    """Frames with so many bytes of payload together."""
    got, frames = 0, []
    while got < size:
        data = host.receive(source)
        r.require(data is not None, f"{kind.name}: {got} of {size} bytes come")
        # Short ones are padded.
        length = struct.unpack(">H", data[18:20])[0] + 40 if kind.v6 else struct.unpack(">H", data[16:18])[0]
        got += 14 + length - kind.headers
        frames.append(data)
    return frames


@pytest.mark.parametrize("kind", o.KINDS, ids=o.NAMES)
def test_from_the_guest(daemon, bridge, kind):
    """They are cut and summed behind the daemon."""
    uso(daemon, kind)
    host = f.Host("ve1")
    with c.Nic(daemon.socket, c.MRG_RXBUF | c.CSUM | kind.host) as nic:
        before = daemon.drops()
        for size in o.SIZES:
            data = o.payload(size)
            frame = kind.frame(f.HOST_MAC, f.GUEST_MAC, data)
            # What fits into one piece is only to be summed.
            nic.transmit(frame, kind.header(o.MSS if size > o.MSS else 0), cuts=(5, 40))
            kind.check(pieces(host, f.GUEST_MAC, kind, size), data)
        r.require(daemon.drops() == before, f"{daemon.drops()}, before {before}")
    host.close()


@pytest.mark.parametrize("takes", (True, False), ids=("taken-whole", "cut"))
@pytest.mark.parametrize("kind", o.KINDS, ids=o.NAMES)
def test_to_the_guest(daemon, kind, takes):
    uso(daemon, kind)
    host = f.Host("vs0")
    host.socket.setsockopt(o.SOL_PACKET, o.PACKET_VNET_HDR, 1)
    features = c.MRG_RXBUF | (c.GUEST_CSUM | kind.guest if takes else 0)
    with c.Nic(daemon.socket, features) as nic:
        nic.fill(120, 2048)
        for size in o.SIZES:
            data = o.payload(size)
            frame = kind.frame(f.GUEST_MAC, f.HOST_MAC, data)
            head = kind.header(o.MSS if size > o.MSS else 0)
            host.send(head[:10] + frame)
            frames, got = [], 0
            while got < size:
                taken = nic.take()
                r.require(taken is not None, f"{kind.name}: {got} of {size} bytes come")
                if taken[1][6:12] != f.HOST_MAC:
                    continue  # The bridge's own.
                seen, bytes_, _ = taken
                frames.append(bytes_)
                length = struct.unpack(">H", bytes_[18:20])[0] + 40 if kind.v6 else struct.unpack(">H", bytes_[16:18])[0]
                got += 14 + length - kind.headers
            if takes:
                flags, gso, _, segment, start, offset = struct.unpack_from("<BBHHHH", seen)
                want = (f.NEEDS_CSUM, kind.gso if size > o.MSS else 0, o.MSS if size > o.MSS else 0, 14 + kind.ip_bytes, kind.sum_at)
                r.require((flags, gso, segment, start, offset) == want, f"{kind.name}, {size} bytes: a header {seen.hex()}")
                r.require(frames == [frame], f"{kind.name}, {size} bytes: other than it was sent")
            else:
                r.require(seen[:2] == b"\0\0", f"{kind.name}, {size} bytes: a header {seen.hex()}")
                kind.check(frames, data)
            nic.fill(120 - len(nic.rings[0].chains), 2048)
    host.close()
