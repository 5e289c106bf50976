"""Tests DPDK's testpmd as front end: an independent driver that polls.

It uses no notifications and no huge pages.
"""

import random
import re
import struct
import subprocess

import net_frames as f
import net_rig as n
import pytest
import rig as r

FRAMES = 600
SEED = 23


# Pairs of queues, and more arguments of the device.
CASES = [
    (pairs, keys)
    for pairs in (1, 2, 4)
    for keys in ("", ",mrg_rxbuf=0", ",packed_vq=1", ",packed_vq=1,mrg_rxbuf=0", ",in_order=0", ",vectorized=1,mrg_rxbuf=0")
    if not (pairs > 1 and "vectorized" in keys or pairs == 2 and "mrg" in keys)
]


class Testpmd:
    """testpmd on a socket, told what to do by lines."""

    __test__ = False

    def __init__(self, rig, program, daemon, name, pairs, keys):
        device = f"net_virtio_user0,path={daemon.socket},queues={pairs},server=0,mac={n.MAC},queue_size=256{keys}"
        # Else it keeps what it says to itself until it ends.
        argv = [r.tool("stdbuf", "coreutils"), "-oL", program]
        argv += ["--no-huge", "--no-pci", "-m", "256", "--iova-mode=va", "-l", "0,1", "--no-telemetry"]
        argv += ["--file-prefix", f"{rig.dir.name}-{name}", f"--vdev={device}", "--", "-i", "--total-num-mbufs=16384"]
        argv += [f"--rxq={pairs}", f"--txq={pairs}", "--nb-cores=1", "--txonly-multi-flow"]
        self.daemon = daemon
        self.child = r.Child(rig, f"testpmd-{name}", argv, stdin=subprocess.PIPE)
        self.seen = 0
        self.wait("testpmd> ")

    def wait(self, words):
        """Waits until it says that, after what was seen; what it said since."""

        def said():
            r.require(self.child.running(), f"testpmd ended with {self.child.process.returncode}: {self.child.tail()}")
            return words in self.child.unfinished()[self.seen :]

        r.wait_for(f"testpmd says {words!r}", said)
        text = self.child.unfinished()[self.seen :]
        self.seen += len(text)
        return text

    def tell(self, line, answer="testpmd> "):
        self.child.process.stdin.write(f"{line}\n".encode())
        self.child.process.stdin.flush()
        return self.wait(answer)

    def forward(self, mode):
        self.tell(f"set fwd {mode}", f"Set {mode}")
        self.tell("start", "nb forwarding")

    def stop(self):
        """Packets received and sent since `forward`."""
        return self.counts(self.tell("stop", "Done."))

    def received(self):
        """Packets received since `forward`."""
        # The line below the numbers.
        return self.counts(self.tell("show fwd stats all", "+" * 60))[0]

    @staticmethod
    def counts(text):
        found = re.search(r"Accumulated forward statistics.*?RX-packets: (\d+).*?TX-packets: (\d+)", text, re.S)
        r.require(found, f"testpmd says {text!r}")
        return int(found[1]), int(found[2])

    def end(self):
        self.child.process.stdin.write(b"quit\n")
        self.child.process.stdin.flush()
        code = self.child.wait()
        r.require(code == 0, f"testpmd ended with {code}: {self.child.tail()}")


def packets(daemon, way):
    return sum(c[way] for c in daemon.counters().values())


def blast(host, chance, arrived):
    """FRAMES frames of many flows to the guest, no faster than they are taken: `arrived()` is how many were."""
    before = arrived()
    for k in range(FRAMES):
        port = 1000 + chance.randrange(64)
        payload = b"x" * chance.choice((18, 200, 1400))
        udp = struct.pack(">HHHH", port, 9, len(payload) + 8, 0) + payload
        ip = struct.pack(">BBHHHBBH8B", 0x45, 0, len(udp) + 20, 0, 0x4000, 64, 17, 0, 10, 9, 0, 1, 10, 9, 0, 2)
        ip = ip[:10] + struct.pack(">H", f.checksum(ip)) + ip[12:]
        host.send(f.GUEST_MAC + f.HOST_MAC + b"\x08\x00" + ip + udp)
        if k % 50 == 49:
            r.wait_for(f"{k + 1} frames arrive", lambda: arrived() - before >= k + 1, every_s=0.002)


@pytest.mark.parametrize("pairs, keys", CASES, ids=[f"{pairs}{keys}" for pairs, keys in CASES])
def test_forwarding(rig, testpmd, pairs, keys):
    chance = random.Random(SEED)
    # Its arguments take no path with '='.
    name = f"{pairs}{keys.replace(',', '-').replace('=', '')}"
    with n.Net(rig, f"pmd-{name}", pairs=pairs) as daemon:
        host = f.Host("vs0")
        pmd = Testpmd(rig, testpmd, daemon, name, pairs, keys)

        pmd.forward("rxonly")
        blast(host, chance, lambda: packets(daemon, "to-guest-packets"))
        r.wait_for("testpmd has taken them", lambda: pmd.received() >= FRAMES, every_s=0.05)
        got = pmd.stop()[0]
        r.require(got >= FRAMES, f"rxonly: testpmd got {got} of {FRAMES} frames")

        # Frames of one segment, and of several: in a packed ring those have a table, whose header
        # testpmd marks as to be written.
        for segments in ("64", "64,200,64"):
            pmd.tell(f"set txpkts {segments}")
            sent = packets(daemon, "from-guest-packets")
            at_tap = n.statistic("rx_packets")
            pmd.forward("txonly")
            r.wait_for("frames come", lambda before=sent: packets(daemon, "from-guest-packets") - before > 20_000)
            tx = pmd.stop()[1]
            r.wait_for("what testpmd sent came", lambda before=sent, all=tx: packets(daemon, "from-guest-packets") - before >= all)
            came, seen = packets(daemon, "from-guest-packets") - sent, n.statistic("rx_packets") - at_tap
            r.require(came == seen == tx, f"txonly, {segments}: testpmd sent {tx}, we count {came}, the tap {seen}: {daemon.drops()}")
        used = [index for index, c in daemon.counters().items() if c["from-guest-packets"]]
        r.require(len(used) == pairs, f"txonly: frames came on the pairs {used} of {pairs}")

        for mode in ("io", "mac"):
            pmd.forward(mode)
            blast(host, chance, lambda: packets(daemon, "from-guest-packets"))
            rx, tx = pmd.stop()
            r.require(rx == tx >= FRAMES, f"{mode}: {rx} received, {tx} sent of {FRAMES}")
        states = {index: q["state"] for index, q in daemon.queues().items()}
        r.require(set(states.values()) == {"running"} and not daemon.drops(), f"{states} {daemon.drops()}")
        host.close()
        pmd.end()
        daemon.end()
