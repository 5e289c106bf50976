"""Numbered frames and checks of them, packet sockets, checksums."""

import random
import socket
import struct
import time

import rig as r

GUEST_MAC = bytes.fromhex("525400123456")
HOST_MAC = bytes.fromhex("020000000001")
# For experiments (IEEE 802): nothing of the kernel's answers.
ETHERTYPE = 0x88B5
# Flag of a virtio-net header: the checksum is left to the receiver.
NEEDS_CSUM = 1
ETH_P_ALL = 3


def frame(number, length, to=GUEST_MAC, source=HOST_MAC):
    """A frame of `length` bytes that says its number; the rest follows from it."""
    head = to + source + struct.pack(">HII", ETHERTYPE, number, length)
    return (head + random.Random(number).randbytes(length))[:length]


def ours(data):
    """Whether it is such a frame, of whatever content."""
    return len(data) >= 22 and struct.unpack_from(">H", data, 12)[0] == ETHERTYPE


def check(data, number, length, to=GUEST_MAC, source=HOST_MAC):
    """That it is the frame `number`, whole."""
    want = frame(number, length, to, source)
    if data != want:
        seen = struct.unpack_from(">II", data, 14) if ours(data) else data[:32]
        where = next((k for k, (a, b) in enumerate(zip(data, want)) if a != b), min(len(data), len(want)))
        raise r.Failed(f"frame {number} of {length} bytes: {len(data)} bytes that say {seen}, wrong from {where} on")


def header(flags=0, gso=0, hdr_len=0, gso_size=0, csum_start=0, csum_offset=0):
    """A virtio-net header (Virtio 1.3, 5.1.6)."""
    return struct.pack("<BBHHHHH", flags, gso, hdr_len, gso_size, csum_start, csum_offset, 0)


class Host:
    """A packet socket on an interface."""

    def __init__(self, ifname):
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        # SO_RCVBUFFORCE
        self.socket.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)
        self.socket.bind((ifname, ETH_P_ALL))

    def send(self, data):
        self.socket.send(data)

    def receive(self, source=GUEST_MAC, wait_s=r.WAIT_S):
        """The next frame from this address; None: not in time."""
        end = time.monotonic() + wait_s
        while True:
            self.socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                data = self.socket.recv(1 << 17)
            except TimeoutError:
                return None
            if data[6:12] == source:
                return data

    def close(self):
        self.socket.close()


def received(nic, wait_s=r.WAIT_S, pair=0):
    """The next frame of a test that a NIC gets; those that the host's stack sends by itself are passed over."""
    end = time.monotonic() + wait_s
    while True:
        got = nic.take(pair, max(0.0, end - time.monotonic()))
        if got is None or ours(got[1]):
            return got


def fold(data, start=0):
    """The Internet checksum's sum of bytes, not inverted."""
    if len(data) % 2:
        data += b"\0"
    total = start + sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def checksum(data, start=0):
    return ~fold(data, start) & 0xFFFF
