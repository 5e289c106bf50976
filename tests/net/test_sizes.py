"""Tests frames of all sizes through buffers of all kinds: no frame is lost or changed.

The kinds are: in place, spilled, staged, and waiting for buffers. A burst consists of the frames
that the tap receives while the daemon is stopped (SIGSTOP), so that they come as one batch.
"""

import random

import net_frames as f
import net_peer as c
import net_rig as n
import pytest
import rig as r

FRAME_MAX = 65_521 + 14
SEED = 11


def standing(daemon, body):
    """Calls `body` while the daemon is stopped."""
    daemon.child.suspend()
    try:
        body()
    finally:
        daemon.child.resume()


def sizes():
    """Some of each magnitude, among them the limits of all kinds of buffers."""
    ends = [60, 61, 64, 1514, 2035, 2036, 2037, 4083, 4084, 4085, FRAME_MAX - 1, FRAME_MAX]
    return sorted({*ends, *range(62, FRAME_MAX, 911)})


class Sizes:
    def __init__(self, rig):
        self.rig = rig
        self.daemon = n.Net(rig, "sizes", pairs=1)
        n.ip("link", "set", "vs0", "mtu", FRAME_MAX - 14)
        self.number = 0

    def nic(self, features):
        """A NIC, and the host's side."""
        return c.Nic(self.daemon.socket, features), f.Host("vs0")

    def next(self):
        self.number += 1
        return self.number

    def from_guest(self, cuts_of):
        """All sizes from the guest, each cut into descriptors at `cuts_of(bytes)`."""
        nic, host = self.nic(c.MRG_RXBUF)
        with nic:
            for length in sizes():
                number = self.next()
                data = f.frame(number, length, f.HOST_MAC, f.GUEST_MAC)
                nic.transmit(data, cuts=cuts_of(length + c.HEADER))
                got = host.receive()
                r.require(got is not None, f"{length} bytes do not come")
                f.check(got, number, length, f.HOST_MAC, f.GUEST_MAC)
        host.close()

    def to_guest(self, features, count, *pieces):
        """All sizes to the guest, which has `count` buffers of such pieces."""
        nic, host = self.nic(features)
        with nic:
            nic.fill(count, *pieces)
            buffer = sum(pieces)
            for length in sizes():
                number = self.next()
                host.send(f.frame(number, length))
                _, data, used = f.received(nic) or (None, b"", 0)
                f.check(data, number, length)
                want = -(-(length + c.HEADER) // buffer)
                r.require(used == want, f"{length} bytes in {used} buffers, not {want}")
                nic.fill(count - len(nic.rings[0].chains), *pieces)
        host.close()

    def burst(self, nic, host, lengths):
        """Frames of these lengths at once; returns their numbers."""
        sent = [(self.next(), length) for length in lengths]
        standing(self.daemon, lambda: [host.send(f.frame(*one)) for one in sent])
        return sent

    def collect(self, nic, sent):
        for number, length in sent:
            got = f.received(nic)
            r.require(got is not None, f"frame {number} of {length} bytes is lost: {self.daemon.drops()}")
            f.check(got[1], number, length)

    def bursts(self):
        """Short, long, short again; with buffers of one size."""
        kinds = (
            [60, 9000, 60],
            [60] * 3 + [40_000] + [60] * 30,
            [9000] * 8 + [60] * 40,
            [1500, 60] * 20,
            [60] * 90 + [9000, 60, 60_000, 60],
        )
        for lengths in kinds:
            for bytes_each in (2048, 512, 80, 12):
                # A NIC each time: buffers that the device has taken stay those of before.
                nic, host = self.nic(c.MRG_RXBUF)
                with nic:
                    nic.fill(250, bytes_each)
                    if sum(-(-(length + c.HEADER) // bytes_each) for length in lengths) <= 250:
                        self.collect(nic, self.burst(nic, host, lengths))
                host.close()

    def few(self):
        """Fewer buffers than one frame needs: it waits, and those behind it, and all come when there are buffers."""
        nic, host = self.nic(c.MRG_RXBUF)
        with nic:
            before = self.daemon.drops()
            for first in range(0, 7):
                nic.fill(first, 2048)
                sent = self.burst(nic, host, [60] * (first // 2) + [9000, 60, 12_000, 60, 60])
                early = sent[: first // 2]
                self.collect(nic, early)
                r.require(f.received(nic, 0.1) is None, f"a frame came in {first} buffers")
                for number, length in sent[len(early) :]:
                    # One buffer after the other; it comes with the last one that it needs.
                    while (got := f.received(nic, 0.05)) is None:
                        nic.fill(1, 2048)
                    f.check(got[1], number, length)
            r.require(self.daemon.drops() == before, f"drops: {self.daemon.drops()}, before {before}")
        host.close()

    def drawn(self):
        """Bursts, buffers and their pieces by chance, most of the time too few."""
        chance = random.Random(SEED)
        nic, host = self.nic(c.MRG_RXBUF)
        before = self.daemon.drops()
        with nic:
            waiting = []
            for _ in range(60):
                kind = chance.choice([(60, 70), (60, 1514), (1000, 5000), (60, 20_000), (20_000, FRAME_MAX)])
                waiting += self.burst(nic, host, [chance.randint(*kind) for _ in range(chance.randint(1, 12))])
                while len(waiting) > 30 or (waiting and chance.random() < 0.9):
                    for _ in range(chance.randint(1, 8)):
                        pieces = [chance.choice((12, 100, 512, 512, 2048)) for _ in range(chance.randint(1, 3))]
                        if len(nic.rings[0].free) >= len(pieces):
                            nic.give(*pieces)
                    nic.rings[0].publish()
                    while waiting and (got := f.received(nic, 0.005)):
                        f.check(got[1], *waiting.pop(0))
            while waiting:
                nic.fill(len(nic.rings[0].free), 4096)
                self.collect(nic, [waiting.pop(0)])
        r.require(self.daemon.drops() == before, f"drops: {self.daemon.drops()}, before {before}")
        host.close()

    def without_merge(self):
        """A frame that is longer than the buffer that it comes to is dropped and counted; the others come."""
        nic, host = self.nic(0)
        with nic:
            before = self.daemon.drops().get("too-long", 0)
            for turn in range(20):
                nic.fill(4, 5, 7, 1000, 488)
                lengths = [60, 1500, 1501, 1000] if turn % 2 else [9000, 1488, 60_000, 60, 1500, 80]
                sent = self.burst(nic, host, lengths)
                self.collect(nic, [one for one in sent if one[1] + c.HEADER <= 1500])
                # Buffers that are left over are used first.
                while nic.rings[0].chains:
                    number = self.next()
                    host.send(f.frame(number, 60))
                    self.collect(nic, [(number, 60)])
            lost = self.daemon.drops().get("too-long", 0) - before
            r.require(lost == 10 * 2 + 10 * 3, f"{lost} were dropped as too long")
        host.close()


@pytest.fixture(scope="module")
def sizes_of(rig):
    made = Sizes(rig)
    with made.daemon:
        yield made


CUTS = {
    "one-descriptor": lambda _: (),
    "header-alone": lambda _: (c.HEADER,),
    "header-over-two-frame-over-many": lambda length: (5, 20, *range(100, length, 700)),
}
# Features, how many buffers, their pieces.
BUFFERS = {
    "merged": (c.MRG_RXBUF, 250, 2048),
    "small-header-over-two": (c.MRG_RXBUF, 120, 5, 595),
    "one-large-without-merge": (0, 20, 65_560),
    "long-chains-header-over-two": (0, 10, 5, 7, *[4096] * 16),
}


@pytest.mark.parametrize("cuts", CUTS)
def test_all_sizes_from_the_guest(sizes_of, cuts):
    sizes_of.from_guest(CUTS[cuts])


@pytest.mark.parametrize("buffers", BUFFERS)
def test_all_sizes_to_the_guest(sizes_of, buffers):
    sizes_of.to_guest(*BUFFERS[buffers])


def test_long_and_short_frames_in_one_burst(sizes_of):
    sizes_of.bursts()


def test_fewer_buffers_than_one_frame_needs(sizes_of):
    sizes_of.few()


def test_bursts_and_buffers_at_random_too_few(sizes_of):
    sizes_of.drawn()


def test_frames_too_long_for_the_buffers(sizes_of):
    sizes_of.without_merge()


def test_the_tap_is_removed_at_the_end(sizes_of):
    sizes_of.daemon.end()
