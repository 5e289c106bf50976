"""Frames of all sizes through buffers of all kinds: in place, spilled, staged, waiting for buffers; nothing lost or changed.

A burst is what the tap has while the daemon stands still (SIGSTOP), so that it comes as one batch.
"""

import random

import net_frames as f
import net_peer as c
import net_rig as n
import rig as r

FRAME_MAX = 65_521 + 14
SEED = 11


def standing(daemon, body):
    """Does `body` while the daemon stands still."""
    daemon.child.suspend()
    try:
        body()
    finally:
        daemon.child.resume()


def sizes():
    """Some of each magnitude, the ends of all kinds of buffers among them."""
    ends = [60, 61, 64, 1514, 2035, 2036, 2037, 4083, 4084, 4085, FRAME_MAX - 1, FRAME_MAX]
    return sorted({*ends, *range(62, FRAME_MAX, 911)})


class Sizes:
    def __init__(self, rig):
        self.rig = rig
        self.daemon = n.Net(rig, "sizes", pairs=1)
        n.ip("link", "set", "vs0", "mtu", FRAME_MAX - 14)
        self.number = 0

    def card(self, features):
        """A card, and the host's side."""
        return c.Card(self.daemon.socket, features), f.Host("vs0")

    def next(self):
        self.number += 1
        return self.number

    def from_guest(self, cuts_of):
        """All sizes from the guest, each cut into descriptors at `cuts_of(bytes)`."""
        card, host = self.card(c.MRG_RXBUF)
        with card:
            for length in sizes():
                number = self.next()
                data = f.frame(number, length, f.HOST_MAC, f.GUEST_MAC)
                card.transmit(data, cuts=cuts_of(length + c.HEADER))
                got = host.receive()
                r.require(got is not None, f"{length} bytes do not come")
                f.check(got, number, length, f.HOST_MAC, f.GUEST_MAC)
        host.close()

    def to_guest(self, features, count, *pieces):
        """All sizes to the guest, which has `count` buffers of such pieces."""
        card, host = self.card(features)
        with card:
            card.fill(count, *pieces)
            buffer = sum(pieces)
            for length in sizes():
                number = self.next()
                host.send(f.frame(number, length))
                _, data, used = f.received(card) or (None, b"", 0)
                f.check(data, number, length)
                want = -(-(length + c.HEADER) // buffer)
                r.require(used == want, f"{length} bytes in {used} buffers, not {want}")
                card.fill(count - len(card.rings[0].chains), *pieces)
        host.close()

    def burst(self, card, host, lengths):
        """Frames of these lengths at once; returns their numbers."""
        sent = [(self.next(), length) for length in lengths]
        standing(self.daemon, lambda: [host.send(f.frame(*one)) for one in sent])
        return sent

    def collect(self, card, sent):
        for number, length in sent:
            got = f.received(card)
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
                # A card each time: buffers that the device has taken stay those of before.
                card, host = self.card(c.MRG_RXBUF)
                with card:
                    card.fill(250, bytes_each)
                    if sum(-(-(length + c.HEADER) // bytes_each) for length in lengths) <= 250:
                        self.collect(card, self.burst(card, host, lengths))
                host.close()

    def few(self):
        """Fewer buffers than one frame needs: it waits, and those behind it, and all come when there are buffers."""
        card, host = self.card(c.MRG_RXBUF)
        with card:
            before = self.daemon.drops()
            for first in range(0, 7):
                card.fill(first, 2048)
                sent = self.burst(card, host, [60] * (first // 2) + [9000, 60, 12_000, 60, 60])
                early = sent[: first // 2]
                self.collect(card, early)
                r.require(f.received(card, 0.1) is None, f"a frame came in {first} buffers")
                for number, length in sent[len(early) :]:
                    # One buffer after the other; it comes with the last one that it needs.
                    while (got := f.received(card, 0.05)) is None:
                        card.fill(1, 2048)
                    f.check(got[1], number, length)
            r.require(self.daemon.drops() == before, f"drops: {self.daemon.drops()}, before {before}")
        host.close()

    def drawn(self):
        """Bursts, buffers and their pieces by chance, most of the time too few."""
        chance = random.Random(SEED)
        card, host = self.card(c.MRG_RXBUF)
        before = self.daemon.drops()
        with card:
            waiting = []
            for _ in range(60):
                kind = chance.choice([(60, 70), (60, 1514), (1000, 5000), (60, 20_000), (20_000, FRAME_MAX)])
                waiting += self.burst(card, host, [chance.randint(*kind) for _ in range(chance.randint(1, 12))])
                while len(waiting) > 30 or (waiting and chance.random() < 0.9):
                    for _ in range(chance.randint(1, 8)):
                        pieces = [chance.choice((12, 100, 512, 512, 2048)) for _ in range(chance.randint(1, 3))]
                        if len(card.rings[0].free) >= len(pieces):
                            card.give(*pieces)
                    card.rings[0].publish()
                    while waiting and (got := f.received(card, 0.005)):
                        f.check(got[1], *waiting.pop(0))
            while waiting:
                card.fill(len(card.rings[0].free), 4096)
                self.collect(card, [waiting.pop(0)])
        r.require(self.daemon.drops() == before, f"drops: {self.daemon.drops()}, before {before}")
        host.close()

    def without_merge(self):
        """A frame that is longer than the buffer that it comes to is dropped and counted; the others come."""
        card, host = self.card(0)
        with card:
            before = self.daemon.drops().get("too-long", 0)
            for turn in range(20):
                card.fill(4, 5, 7, 1000, 488)
                lengths = [60, 1500, 1501, 1000] if turn % 2 else [9000, 1488, 60_000, 60, 1500, 80]
                sent = self.burst(card, host, lengths)
                self.collect(card, [one for one in sent if one[1] + c.HEADER <= 1500])
                # Buffers that are left over are used first.
                while card.rings[0].chains:
                    number = self.next()
                    host.send(f.frame(number, 60))
                    self.collect(card, [(number, 60)])
            lost = self.daemon.drops().get("too-long", 0) - before
            r.require(lost == 10 * 2 + 10 * 3, f"{lost} were dropped as too long")
        host.close()


def tests(rig):
    s = Sizes(rig)
    whole = s.from_guest
    rig.test("net: all sizes from the guest, in one descriptor", lambda: whole(lambda _: ()))
    rig.test("net: its header in one of its own", lambda: whole(lambda _: (c.HEADER,)))
    rig.test("net: its header over two, the frame over many", lambda: whole(lambda n: (5, 20, *range(100, n, 700))))
    rig.test("net: all sizes to the guest, merged", lambda: s.to_guest(c.MRG_RXBUF, 250, 2048))
    rig.test("net: in small buffers, the header over two descriptors", lambda: s.to_guest(c.MRG_RXBUF, 120, 5, 595))
    rig.test("net: without merged buffers, in one big one", lambda: s.to_guest(0, 20, 65_560))
    rig.test("net: in long chains, the header over two descriptors", lambda: s.to_guest(0, 10, 5, 7, *[4096] * 16))
    rig.test("net: long and short frames in one burst", s.bursts)
    rig.test("net: fewer buffers than one frame needs", s.few)
    rig.test("net: bursts and buffers by chance, too few of them", s.drawn)
    rig.test("net: frames too long for a guest's buffers", s.without_merge)
    rig.test("net: nothing is left of the tap", s.daemon.end)
