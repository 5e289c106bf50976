"""Tests a guest whose front end leaves the control queue to the daemon.

Pairs are enabled and disabled under traffic, offloads are switched, and wrong commands are sent.
Meanwhile workers change, and the daemon is killed.
"""

import random
import struct
import time

import net_frames as f
import net_load as t
import net_offload as o
import net_peer as c
import net_rig as n
import pytest
import rig as r

PAIRS = 4
TURNS, KILLS = 16, 4
KINDS = {"split": [], "packed": ["packed"], "plain": ["plain"]}
OK, ERR = 0, 1
CONTROL = c.MRG_RXBUF | c.MQ | c.CTRL_VQ | c.CTRL_GUEST_OFFLOADS


def pairs_set(count):
    return b"\x04\0", struct.pack("<H", count)


def offloads_set(bits):
    return b"\x05\0", struct.pack("<Q", bits)


def obeys(nic, said, want=OK):
    """A command is answered so."""
    got = nic.command(*said)
    r.require(got == (want, 1), f"{said} is answered by {got}, not by {want}")


class Load(t.Load):
    """Traffic of a guest with a control queue."""

    def order(self, *line):
        self.answers += 1
        self.tell(" ".join(str(word) for word in line))

    def obeyed(self):
        r.wait_for("a command is done", lambda: self.child.output().count("done") >= self.answers or self.ended())

    def use(self, count):
        self.order("pairs", count)
        self.obeyed()


@pytest.mark.usefixtures("net_guest")
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_come_and_go_under_traffic(rig, kind):
    """Pairs are enabled and disabled while queues move, the control queue too.

    Lost frames are counted.
    """
    with t.daemon(rig, f"pairs-{kind}") as daemon:
        load = Load(rig, daemon, f"control-{kind}", "control", *KINDS[kind])
        chance = random.Random(t.SEED)
        control = daemon.control_queue()
        r.require(control["index"] == PAIRS and control["state"] == "running", f"{control}")
        workers = [daemon.worker_new() for _ in range(2)]
        fewer, before = 0, PAIRS
        for turn in range(TURNS):
            pairs = [4, 1, 2, 4, 3, 1, 4, 2][turn % 8]
            fewer += pairs < before
            before = pairs
            load.order("pairs", pairs)
            # While the command may be under way.
            daemon.cli("attach", f"c0:{chance.choice([PAIRS, chance.randrange(PAIRS)])}", chance.choice(workers))
            load.order("offloads", chance.choice([0, c.GUEST_CSUM]))
            load.obeyed()
        load.use(PAIRS)
        load.progress()
        to, back = load.end()
        drops, control = daemon.drops(), daemon.control_queue()
        uncounted = to[1] - sum(drops.values())
        rig.say(f"{kind}: {control['requests']} commands, {to[0]} frames to the guest, {to[1]} lost; counted: {drops}")
        r.require(back[1] == 0, f"{back[1]} of {back[0]} frames from the guest are lost")
        # The kernel throws away what comes between our last look into a queue and its detaching.
        r.require(0 <= uncounted <= fewer * t.WINDOW, f"{to[1]} of {to[0]} frames to the guest are lost, and {drops} counted")
        r.require(control["requests"] == 2 * TURNS + 1 and control["errors"] == 0, f"{control}")
        daemon.end()


@pytest.mark.usefixtures("net_guest")
@pytest.mark.parametrize("kind", ("split", "packed"))
def test_kills_with_commands_under_way(rig, kind):
    """The next daemon does them, and knows those that were done."""
    with t.daemon(rig, f"control-killed-{kind}", kept=True) as daemon:
        load = Load(rig, daemon, f"control-killed-{kind}", "control", *KINDS[kind])
        chance = random.Random(t.SEED)
        for turn in range(KILLS):
            count = turn % PAIRS + 1
            load.use(PAIRS - count + 1)
            load.order("pairs", count)
            time.sleep(chance.choice([0, chance.uniform(0, 0.01)]))
            daemon.child.kill()
            daemon.start()
            load.obeyed()
            load.progress()
        to, back = load.end()
        r.require(f"# {KILLS} reconnects" in load.child.output(), load.child.tail())
        rig.say(f"{kind}: {KILLS} kills, to the guest {to[0]} frames and {to[1]} lost, from it {back[0]} and {back[1]} lost")
        r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_one_pair_is_active_at_first(rig):
    """A device whose rings are stopped and started keeps the number of its pairs."""
    with n.Net(rig, "control", pairs=2) as daemon:
        host = f.Host("vs0")

        def spread(nic):
            """On which pairs frames of several flows come."""
            on = set()
            for pair in range(2):
                nic.fill(100 - len(nic.rings[2 * pair].chains), 2048, pair=pair)
            for port in range(40):
                source = bytes([2, 0, 0, 0, 1, port])
                ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 48, 0, 0, 64, 17, 0, bytes([10, 9, 0, 2]), bytes([10, 9, 0, 1 + port]))
                ip = ip[:10] + struct.pack(">H", f.checksum(ip)) + ip[12:]
                host.send(f.GUEST_MAC + source + b"\x08\0" + ip + struct.pack(">HHHH", 4000 + port, 9, 28, 0) + bytes(20))
                want = time.monotonic() + r.WAIT_S
                while time.monotonic() < want:
                    got = [(pair, frame) for pair in range(2) if (frame := nic.take(pair, 0))]
                    on.update(pair for pair, frame in got if frame[1][6:12] == source)
                    if any(frame[1][6:12] == source for _, frame in got):
                        break
                else:
                    raise r.Failed(f"a frame from {source.hex()} does not come")
            return on

        with c.Nic(daemon.socket, CONTROL, pairs=2) as nic:
            r.require(spread(nic) == {0}, "frames come on the second pair before it is used")
            obeys(nic, pairs_set(2))
            r.require(spread(nic) == {0, 1}, "no frame comes on the second pair")
            obeys(nic, pairs_set(1))
            # As when a virtual machine is suspended.
            for ring in nic.rings:
                base = nic.request(c.p.GET_VRING_BASE, struct.pack("<II", ring.index, 0))
                nic.order(c.p.SET_VRING_BASE, base)
            for ring in nic.rings:
                nic.order(c.p.SET_VRING_KICK, struct.pack("<Q", ring.index), [ring.kick])
            r.require(spread(nic) == {0}, "frames come on the second pair again")
            obeys(nic, pairs_set(2))
        # One that has the control queue itself.
        with c.Nic(daemon.socket, c.MRG_RXBUF | c.MQ, pairs=2) as nic:
            r.require(spread(nic) == {0, 1}, "no frame comes on the second pair")
            r.require(daemon.control_queue()["state"] == "stopped", f"{daemon.control_queue()}")
        host.close()
        daemon.end()


def test_wrong_commands(rig):
    """They are refused. One without room for the answer breaks its ring, and no other."""
    with n.Net(rig, "lies", pairs=2) as daemon:
        host = f.Host("vs0")
        far = c.MEMORY + (1 << 30)

        def passes(nic):
            nic.fill(4, 2048)
            nic.transmit(f.frame(1, 600, f.HOST_MAC, f.GUEST_MAC), pair=1)
            r.require(host.receive() is not None, "a frame from the guest does not come")
            host.send(f.frame(2, 600))
            got = f.received(nic)
            r.require(got is not None, "a frame to the guest does not come")
            f.check(got[1], 2, 600)

        def broken(nic, segs):
            ring = nic.rings[-1]
            ring.add(segs)
            ring.publish()
            r.require(ring.broken(), f"{segs}: the front end is not told of an error")
            r.wait_for("the state is told", lambda: daemon.control_queue()["state"] == "broken")
            states = [q["state"] for q in daemon.queues().values()]
            r.require(states == ["running"] * 2, f"{states}")
            passes(nic)

        bad = [pairs_set(0), pairs_set(3), pairs_set(0xFFFF), offloads_set(c.GUEST_TSO4), offloads_set(1 << 63)]
        # No commands, others, too short, too long.
        bad += [[b"\x04"], [b"\x04\0", b"\x01"], [b"\x04\0", b"\x01\0\0"], [b"\x05\0", bytes(7)], [b"\x05\0", bytes(900)]]
        bad += [[b"\0\0", b"\x01"], [b"\x01\x01", bytes(6)], [b"\x04\x01", bytes(40)], [b"\xff\xff"], []]
        with c.Nic(daemon.socket, CONTROL, pairs=2) as nic:
            for said in bad:
                obeys(nic, said, ERR)
            ring = nic.rings[-1]
            for segs in (
                [(far, 2, 0), (ring.room(1), 1, c.WRITE)],
                [(ring.room(2), 2, 0), (far, 2, 0), (ring.room(1), 1, c.WRITE)],
            ):
                nic.ram[segs[-1][0]] = 0xEE
                ring.add(segs)
                ring.publish()
                r.require(ring.pop(r.WAIT_S) is not None and nic.ram[segs[-1][0]] == ERR, f"{segs} is not refused")
            # In as many pieces as there are bytes, with an answer of many bytes; and two that mean
            # nothing here.
            got = nic.command(*(bytes([b]) for b in b"\x04\0\x02\0"), answer=64)
            r.require(got == (OK, 1), f"{got}")
            obeys(nic, pairs_set(1))
            obeys(nic, [b"\x03\0"])
            obeys(nic, offloads_set(0))
            control = daemon.control_queue()
            r.require((control["requests"], control["errors"]) == (len(bad) + 6, len(bad) + 2), f"{control}")
            passes(nic)
            broken(nic, [(ring.room(4), 4, 0)])
        for segs in ([(0, 4, 0), (far, 1, c.WRITE)], [(0, 4, 0), (100, 0, c.WRITE)]):
            with c.Nic(daemon.socket, CONTROL, pairs=2) as nic:
                broken(nic, segs)
        # Without MQ the third ring is the control queue, and there are no pairs to be set.
        with c.Nic(daemon.socket, CONTROL & ~c.MQ, pairs=1) as nic:
            obeys(nic, pairs_set(1), ERR)
            obeys(nic, offloads_set(0))
            r.require(daemon.control_queue()["state"] == "running", f"{daemon.control_queue()}")
            nic.fill(4, 2048)
            host.send(f.frame(3, 600))
            r.require(f.received(nic) is not None, "a frame to the guest does not come")
        # A ring that this guest has not.
        with c.Nic(daemon.socket, c.MRG_RXBUF | c.MQ, pairs=2) as nic:
            extra = c.Ring(nic, 2 * 2, 16)
            extra.begin()
            r.require(extra.broken(), "a control queue starts that was not agreed on")
        host.close()
        daemon.end()


def frames(nic, kind, send, data):
    """Those in which a super frame comes."""
    nic.fill(120 - len(nic.rings[0].chains), 2048)
    send()
    got, come = 0, []
    while got < len(data):
        taken = nic.take()
        r.require(taken is not None, f"{kind.name}: {got} of {len(data)} bytes come")
        if taken[1][12:14] == b"\x08\0":
            come.append(taken[1])
            got += len(taken[1]) - kind.headers
    return come


def switches_offloads(nic, kind, send, frame, data):
    """A super frame comes whole, and cut while the guest does not take it."""
    nic.fill(100, 2048)
    for bits, whole in ((None, True), (0, False), (c.GUEST_CSUM | kind.guest, True), (c.GUEST_CSUM, False)):
        if bits is not None:
            obeys(nic, offloads_set(bits))
        come = frames(nic, kind, send, data)
        if whole:
            r.require(come == [frame], f"offloads {bits}: {len(come)} frames come, not the one that was sent")
        else:
            r.require(len(come) > 1, f"offloads {bits}: one frame comes")
            if bits == 0:
                kind.check(come, data)


def test_offloads_of_a_tap_are_switched(rig):
    kind, data = o.KINDS[0], o.payload(5 * o.MSS)
    with n.Net(rig, "offloads", pairs=1, mtu=1500) as daemon:
        host = f.Host("vs0")
        host.socket.setsockopt(o.SOL_PACKET, o.PACKET_VNET_HDR, 1)
        frame = kind.frame(f.GUEST_MAC, f.HOST_MAC, data)
        with c.Nic(daemon.socket, CONTROL & ~c.MQ | c.GUEST_CSUM | kind.guest) as nic:
            switches_offloads(nic, kind, lambda: host.send(kind.header()[:10] + frame), frame, data)
        host.close()
        daemon.end()


def test_offloads_on_a_switch_are_switched(rig):
    kind, data = o.KINDS[0], o.payload(5 * o.MSS)
    two = n.Two(rig, "control-switch")
    a = c.Nic(two.sockets[0], c.MRG_RXBUF | c.CSUM | kind.host)
    b = c.Nic(two.sockets[1], CONTROL & ~c.MQ | c.GUEST_CSUM | kind.guest)
    with a, b:
        frame = kind.frame(n.B_MAC, n.A_MAC, data)
        switches_offloads(b, kind, lambda: a.transmit(frame, kind.header()), frame, data)
    r.require(two.child.stop() == 0, two.child.tail())


def test_a_frame_that_waits_for_a_pair_that_is_put_out_of_use(rig):
    """It waits for buffers, and does not come on that pair any more."""
    with n.Net(rig, "aside", pairs=2) as daemon:
        host = f.Host("vs0")
        with c.Nic(daemon.socket, CONTROL, pairs=2) as nic:
            obeys(nic, pairs_set(2))
            nic.fill(100, 2048, pair=0)
            # Too small for a frame by itself.
            nic.fill(1, 600, pair=1)
            for port in range(40):
                ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 1028, 0, 0, 64, 17, 0, bytes([10, 9, 0, 2]), bytes([10, 9, 0, 1 + port]))
                ip = ip[:10] + struct.pack(">H", f.checksum(ip)) + ip[12:]
                udp = struct.pack(">HHHH", 4000 + port, 9, 1008, 0) + bytes(1000)
                host.send(f.GUEST_MAC + bytes([2, 0, 0, 0, 1, port]) + b"\x08\0" + ip + udp)
            while nic.take(0, 0.3):
                pass
            obeys(nic, pairs_set(1))
            nic.fill(20, 2048, pair=1)
            r.require(nic.take(1, 0.5) is None, "a frame comes by a pair that is out of use")
            r.require(daemon.drops().get("no-buffers", 0) > 0, f"{daemon.drops()}")
        host.close()


def test_a_broken_pair_that_is_put_out_of_use_and_back(rig):
    """A pair of a switch whose receive ring is broken stays broken, and keeps no worker busy."""
    daemon, sockets = n.joined(rig, "again")
    try:
        with c.Nic(sockets[0], c.MRG_RXBUF) as a, c.Nic(sockets[1], CONTROL, pairs=2) as b:
            obeys(b, pairs_set(2))
            # Where it is, and that its flow comes in by pair 1.
            b.transmit(f.frame(1, 64, f.HOST_MAC, f.GUEST_MAC), pair=1)
            b.fill(1, 2048, pair=1)
            a.transmit(f.frame(2, 64, f.GUEST_MAC, f.HOST_MAC))
            r.require(b.take(1) is not None, "a frame does not come")
            # Room for a part of the next one, and then nothing that can be used.
            b.give(600, pair=1)
            ring = b.rings[2]
            ring.add([(c.MEMORY + (1 << 30), 2048, c.WRITE)])
            ring.publish()
            a.transmit(f.frame(3, 1000, f.GUEST_MAC, f.HOST_MAC))

            def state():
                return next(q["state"] for q in daemon.status()["queues"] if (q["export"], q["index"]) == ("c1", 1))

            r.wait_for("a queue that is broken", lambda: state() == "broken")
            for count in (1, 2):
                obeys(b, pairs_set(count))
            a.transmit(f.frame(4, 64, f.GUEST_MAC, f.HOST_MAC))
            n.rests(daemon)
        r.require(daemon.child.stop() == 0, daemon.child.tail())
    finally:
        daemon.child.kill()
