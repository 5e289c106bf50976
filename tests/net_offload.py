"""Segmentation and checksums: super frames from and to the guest, whole where both sides take them, else cut with right sums.

From the guest they go over a bridge to a link without any offload, where the kernel has to cut and to sum: what comes
out at its far end is checked. To the guest they come from a packet socket that says what is left to do, as a stack does.
"""

import struct

import net_frames as f
import net_hostile
import net_peer as c
import net_rig as n
import rig as r

TCP4, TCP6, UDP_L4 = 1, 4, 5
NEEDS_CSUM = 1
SOL_PACKET, PACKET_VNET_HDR = 263, 15
MSS = 1400


class Kind:
    """A kind of super frame."""

    def __init__(self, name, gso, v6, udp, host, guest):
        self.name, self.gso, self.v6, self.udp, self.host, self.guest = name, gso, v6, udp, host, guest
        self.ip_bytes = 40 if v6 else 20
        self.headers = 14 + self.ip_bytes + (8 if udp else 20)
        self.sum_at = 6 if udp else 16

    def pseudo(self, addresses, length):
        """Sum of the pseudo-header."""
        return f.fold(addresses + struct.pack(">II", length, 17 if self.udp else 6))

    def frame(self, to, source, payload):
        """A super frame whose checksum is left to others."""
        proto = 17 if self.udp else 6
        length = self.headers - 14 - self.ip_bytes + len(payload)
        if self.v6:
            addresses = bytes.fromhex("fd000000000000000000000000000001fd000000000000000000000000000002")
            ip = struct.pack(">IHBB", 6 << 28, length, proto, 64) + addresses
        else:
            addresses = bytes([10, 9, 0, 2, 10, 9, 0, 1])
            ip = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 7, 0x4000, 64, proto, 0) + addresses
            ip = ip[:10] + struct.pack(">H", f.checksum(ip)) + ip[12:]
        partial = self.pseudo(addresses, length)
        if self.udp:
            head = struct.pack(">HHHH", 4000, 9, length, partial)
        else:
            head = struct.pack(">HHIIBBHHH", 4000, 9, 1000, 1, 0x50, 0x18, 5000, partial, 0)
        return to + source + (b"\x86\xdd" if self.v6 else b"\x08\x00") + ip + head + payload

    def header(self, segment=MSS):
        """The virtio-net header that says so; not cut where `segment` is 0."""
        start = 14 + self.ip_bytes
        gso = self.gso if segment else 0
        return net_hostile.header(NEEDS_CSUM, gso, self.headers if segment else 0, segment, start, self.sum_at)

    def check(self, frames, payload):
        """That these are the pieces of it, in order, each with right sums."""
        got, number = b"", 1000
        for data in frames:
            ip, rest = data[14 : 14 + self.ip_bytes], data[14 + self.ip_bytes :]
            if not self.v6:
                r.require(f.checksum(ip) == 0, f"a wrong sum of an IP header: {ip.hex()}")
            addresses = ip[8:] if self.v6 else ip[12:]
            length = struct.unpack(">H", ip[4:6])[0] if self.v6 else struct.unpack(">H", ip[2:4])[0] - 20
            rest = rest[:length]
            r.require(f.fold(rest, self.pseudo(addresses, length)) == 0xFFFF, f"{self.name}: a wrong checksum")
            if not self.udp:
                r.require(struct.unpack(">I", rest[4:8])[0] == number, f"{self.name}: a piece is not where it belongs")
                number += len(rest) - 20
            piece = rest[self.headers - 14 - self.ip_bytes :]
            r.require(len(piece) <= MSS, f"{self.name}: a piece of {len(piece)} bytes")
            got += piece
        r.require(got == payload, f"{self.name}: {len(got)} bytes came that are not the {len(payload)} sent")


KINDS = (
    Kind("TSO4", TCP4, False, False, c.HOST_TSO4, c.GUEST_TSO4),
    Kind("TSO6", TCP6, True, False, c.HOST_TSO6, c.GUEST_TSO6),
    Kind("USO4", UDP_L4, False, True, c.HOST_USO, c.GUEST_USO4 | c.GUEST_USO6),
    Kind("USO6", UDP_L4, True, True, c.HOST_USO, c.GUEST_USO4 | c.GUEST_USO6),
)
# A super frame of UDP has 64 pieces at most in older kernels.
SIZES = (1, 700, MSS, MSS + 1, 5 * MSS, 60_000)


def payload(size):
    return f.random.Random(size).randbytes(size)


def uso(daemon, kind):
    """The tap's kernel may not have it."""
    if kind.udp:
        with c.p.Peer(daemon.socket) as peer:
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


def from_guest(daemon, kind):
    uso(daemon, kind)
    host = f.Host("ve1")
    with c.Card(daemon.socket, c.MRG_RXBUF | c.CSUM | kind.host) as card:
        before = daemon.drops()
        for size in SIZES:
            data = payload(size)
            frame = kind.frame(f.HOST_MAC, f.GUEST_MAC, data)
            # What fits into one piece is only to be summed.
            card.transmit(frame, kind.header(MSS if size > MSS else 0), cuts=(5, 40))
            kind.check(pieces(host, f.GUEST_MAC, kind, size), data)
        r.require(daemon.drops() == before, f"{daemon.drops()}, before {before}")
    host.close()


def to_guest(daemon, kind, takes):
    uso(daemon, kind)
    host = f.Host("vs0")
    host.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    features = c.MRG_RXBUF | (c.GUEST_CSUM | kind.guest if takes else 0)
    with c.Card(daemon.socket, features) as card:
        card.fill(120, 2048)
        for size in SIZES:
            data = payload(size)
            frame = kind.frame(f.GUEST_MAC, f.HOST_MAC, data)
            head = kind.header(MSS if size > MSS else 0)
            host.send(head[:10] + frame)
            frames, got = [], 0
            while got < size:
                taken = card.take()
                r.require(taken is not None, f"{kind.name}: {got} of {size} bytes come")
                if taken[1][6:12] != f.HOST_MAC:
                    continue  # The bridge's own.
                seen, bytes_, _ = taken
                frames.append(bytes_)
                length = struct.unpack(">H", bytes_[18:20])[0] + 40 if kind.v6 else struct.unpack(">H", bytes_[16:18])[0]
                got += 14 + length - kind.headers
            if takes:
                flags, gso, _, segment, start, offset = struct.unpack_from("<BBHHHH", seen)
                want = (NEEDS_CSUM, kind.gso if size > MSS else 0, MSS if size > MSS else 0, 14 + kind.ip_bytes, kind.sum_at)
                r.require((flags, gso, segment, start, offset) == want, f"{kind.name}, {size} bytes: a header {seen.hex()}")
                r.require(frames == [frame], f"{kind.name}, {size} bytes: other than it was sent")
            else:
                r.require(seen[:2] == b"\0\0", f"{kind.name}, {size} bytes: a header {seen.hex()}")
                kind.check(frames, data)
            card.fill(120 - len(card.rings[0].chains), 2048)
    host.close()


def network():
    """The tap and a link without offloads on a bridge."""
    ethtool = r.tool("ethtool", "ethtool")
    n.ip("link", "add", "ve0", "type", "veth", "peer", "name", "ve1")
    n.ip("link", "add", "br0", "type", "bridge")
    r.run([ethtool, "-K", "ve0", "tx", "off"])
    for name in ("vs0", "ve0"):
        n.ip("link", "set", name, "master", "br0")
    for name in ("ve0", "ve1", "br0"):
        n.ip("link", "set", name, "mtu", "1500", "up")


def tests(rig):
    with n.Net(rig, "offload", pairs=1, mtu=1500) as daemon:
        made = rig.test("net: a bridge to a link without offloads", network)
        for kind in KINDS:
            if made:
                rig.test(f"net: {kind.name} from the guest, cut and summed behind us", lambda k=kind: from_guest(daemon, k))
            rig.test(f"net: {kind.name} to a guest that takes it", lambda k=kind: to_guest(daemon, k, True))
            rig.test(f"net: {kind.name} to a guest that does not", lambda k=kind: to_guest(daemon, k, False))
        if made:
            n.ip("link", "del", "br0")
            n.ip("link", "del", "ve0")
