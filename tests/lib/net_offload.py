"""Super frames of TCP and UDP, whose segmentation and checksums are left to the receiver."""

import struct

import net_frames as f
import net_peer as c
import rig as r

TCP4, TCP6, UDP_L4 = 1, 4, 5
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
        return f.header(f.NEEDS_CSUM, gso, self.headers if segment else 0, segment, start, self.sum_at)

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
NAMES = [kind.name for kind in KINDS]
# A super frame of UDP has 64 pieces at most in older kernels.
SIZES = (1, 700, MSS, MSS + 1, 5 * MSS, 60_000)


def payload(size):
    return f.random.Random(size).randbytes(size)
