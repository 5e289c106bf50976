"""Limits of packets and bytes per second for ports of networks, by the frames that get through.

`vshunt-bench net` plays the guests, and the host behind a tap. Rates are differences of the daemon's counters, and far below what
one CPU can do: tests/lib/rates.py says what a limit promises. As root, in a network namespace.
"""

import contextlib
import itertools
import json
import time

import namespaces
import net_frames as f
import net_peer as c
import net_rig as n
import pytest
import rig as r
from rates import Counted, alike, at_least, at_most, below, close, needs_cpu

pytestmark = pytest.mark.root

# Of tests with a rate: until the rest of 50 ms is used up, and how long the rate is measured.
SETTLE_S, SECONDS = 0.5, 5
# What a source sends where it is to be held back, far more than any limit here.
FAST = ("--rate", "30k")
TX, RX = "from-guest", "to-guest"


@pytest.fixture(scope="module", autouse=True)
def _network():
    n.require_taps()
    with namespaces.OwnNetwork():
        yield


class Ports(r.Daemon):
    """A daemon with ports vm0, vm1 …: each on a tap of its own, or all on one switch. `limits`: keys of each."""

    def __init__(self, rig, name, *limits, switched=False, ports=1, pairs=2):
        self.pairs, self.switched = pairs, switched
        self.sockets = [rig.dir / f"{name}{at}.sock" for at in range(ports)]
        self.taps = [f"vl{at}" for at in range(ports)]
        arguments = ["--net", "type=switch,name=s0"] if switched else []
        for at, (socket, tap) in enumerate(zip(self.sockets, self.taps)):
            own = f",{limits[at]}" if at < len(limits) and limits[at] else ""
            if not switched:
                arguments += ["--net", f"type=tap,name={tap},ifname={tap},queues={pairs}"]
            net = "s0" if switched else tap
            arguments += ["--export", f"type=vhost-user-net,name=vm{at},net={net},socket={socket},queues={pairs}{own}"]
        super().__init__(rig, *arguments, name=name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Its taps are not there for the next one."""
        self.child.kill()

    def list(self, at=0):
        """Its queue pairs."""
        return [q for q in self.status()["queues"] if q["export"] == f"vm{at}" and "net" in q]

    def total(self, key, at=0):
        return sum(q["net"][key] for q in self.list(at))

    def held_back(self, at=0):
        """Wait until a queue waits for its limits."""
        r.wait_for(f"vm{at} waits for its limits", lambda: any(q["limited"] for q in self.list(at)))

    def dropped(self, why, at=0):
        return sum(q["net"]["drops"][why] for q in self.list(at))

    @contextlib.contextmanager
    def load(self, mode, *more, at=0, key=None):
        """A guest in the background; on a tap, with the host behind it. It runs once `key` grows."""
        argv = [r.binary("vshunt-bench"), "net", "--socket", self.sockets[at], "--mode", mode, "--quiet", "--json", "--flows", "64"]
        argv += ["--queues", self.pairs, "--runtime", r.FOREVER, *([] if self.switched else ["--peer", self.taps[at]])]
        child = r.Child(self.rig, f"{self.name}-{mode}{at}", [*argv, *more])
        try:
            r.wait_for(f"vm{at} has frames", lambda: self.runs(child, at, key))
            yield child
        finally:
            child.kill()

    def runs(self, child, at, key):
        r.require(child.running(), child.tail())
        if key is None:
            return sum(q["state"] == "running" for q in self.list(at)) == self.pairs
        return self.total(key, at) > 0

    def counted(self, *keys, seconds=SECONDS, settle_s=SETTLE_S, enough=lambda: True):
        """How much counters grow from now on, (key, port) each: for some seconds, and until it is enough."""

        def seen():
            begin = time.monotonic()
            queues = [q for q in self.status()["queues"] if "net" in q]
            return [sum(q["net"][key] for q in queues if q["export"] == f"vm{at}") for key, at in keys], begin, time.monotonic()

        time.sleep(settle_s)
        before, earliest, since = seen()
        time.sleep(seconds)
        r.wait_for("enough has happened", enough)
        after, until, latest = seen()
        return [Counted(b - a, until - since, latest - earliest) for a, b in zip(before, after)]

    def rate(self, key, at=0, **more):
        return self.counted((key, at), **more)[0]


MODES = {TX: "source", RX: "sink"}
# Limits, length of frames, and what is limited to that.
CASES = {
    "pps-tx": ("pps-tx=4000", 64, TX, "packets", 4000),
    "pps-rx": ("pps-rx=4000", 64, RX, "packets", 4000),
    "bps-tx": ("bps-tx=8M", 1514, TX, "bytes", 8 << 20),
    "bps-rx": ("bps-rx=8M", 1514, RX, "bytes", 8 << 20),
    "pps of the guest": ("pps=4000", 64, TX, "packets", 4000),
    "bps to the guest": ("bps=8M", 1514, RX, "bytes", 8 << 20),
    "pps-size": ("pps-tx=4000,limits.pps-size=250", 1000, TX, "packets", 1000),
    "both": ("pps-rx=6000,limits.bps-rx=2M", 1024, RX, "packets", 2048),
}


BASIC = ["pps-tx", "pps-rx", "bps-tx", "bps-rx"]


@pytest.mark.paced
@pytest.mark.parametrize(("case", "pairs"), [*((case, 2) for case in BASIC), *((case, 1) for case in CASES if case not in ("pps-rx", "bps-tx"))])
def test_a_rate_of_a_tap_is_kept(rig, case, pairs):
    limits, length, way, unit, wanted = CASES[case]
    with Ports(rig, f"tap-{case.replace(' ', '-')}-{pairs}", f"limits.{limits}", pairs=pairs) as ports:
        with ports.load(MODES[way], *FAST, "--size", str(length), key=f"{way}-packets"):
            close(f"{case} with {pairs} pairs", ports.rate(f"{way}-{unit}"), wanted, length if unit == "bytes" else 1)
        waited = [q["limited-us"] for q in ports.list()]
        needs_cpu(sum(waited) > SECONDS * 300_000, f"status does not show the wait: {waited}")


@pytest.mark.paced
@pytest.mark.parametrize(("case", "pairs"), [("pps-tx", 2), ("pps-rx", 2), ("bps-rx", 2), ("pps-rx", 1)])
def test_a_rate_of_a_switch_is_kept_and_its_sender_is_not_held_up(rig, case, pairs):
    """vm0 sends to vm1, and as vm1 is silent, also to vm2, which has no limits."""
    limits, length, way, unit, wanted = CASES[case]
    own = [f"limits.{limits}"] if way == TX else ["", f"limits.{limits}"]
    with Ports(rig, f"switch-{case}-{pairs}", *own, switched=True, ports=3, pairs=pairs) as ports:
        with ports.load("sink", at=1), ports.load("sink", at=2), ports.load("source", "--rate", "12k", "--size", str(length)) as source:
            r.wait_for("frames", lambda: ports.total(f"{RX}-packets", 2) > 0)
            keys = [(f"{RX}-{unit}", 1), (f"{TX}-{unit}", 0), (f"{RX}-{unit}", 2)]
            limited, sent, other = ports.counted(*keys)
            cost = length if unit == "bytes" else 1
            close(f"{case} with {pairs} pairs", limited, wanted, cost)
            if way == RX:
                at_least("the sender, which has no limits", sent.per_second(), 12_000 * cost)
                at_least("the other receiver", other.per_second(), 12_000 * cost)
                r.require(ports.dropped("limited", 1) > 0 and ports.dropped("limited", 2) == 0, "frames are dropped and not counted")
                needs_cpu(sum(q["limited-us"] for q in ports.list(1)) > 1_000_000, f"status shows no wait: {ports.list(1)}")
            else:
                close("the sender", sent, wanted, cost)
                r.require(ports.dropped("limited", 1) == 0, "a frame of the limited sender is dropped")
            r.require(source.running(), source.tail())


@pytest.mark.paced
def test_directions_have_limits_of_their_own(rig):
    """An echo gets more than it may send: its transmit ring is full, and the frames to it continue."""
    with Ports(rig, "both", "limits.pps-rx=5000,limits.pps-tx=2000") as ports:
        with ports.load("echo", *FAST, key=f"{TX}-packets"):
            to, back = ports.counted((f"{RX}-packets", 0), (f"{TX}-packets", 0))
            close("to the guest", to, 5000)
            close("from it", back, 2000)
        ports.cli("limit", "vm0", "--pps", "6000")  # while no guest is there
        with ports.load("echo", *FAST, key=f"{TX}-packets"):
            to, back = ports.counted((f"{RX}-packets", 0), (f"{TX}-packets", 0))
            close("both together", Counted(to.count + back.count, *to[1:]), 6000)
            least = min(to.per_second(), back.per_second())
            needs_cpu(least > 1500, f"one direction starves: {to} to the guest, {back} from it")


# Lets pass 5000 a second for 2 s, and 1000 a second afterwards.
BURST = "limits.pps-tx=1000,limits.burst-pps-tx=5000:2s"


def test_a_burst_ends(rig):
    """The bucket holds 10,000 frames, and 1000 a second leak out of it. All that may pass does so, and no more."""
    with Ports(rig, "burst", BURST) as ports:
        since = time.monotonic()
        with ports.load("source", *FAST):

            def sent():
                found = ports.total(f"{TX}-packets")
                at_most("in a burst and after it", found, 10_000 + 1000 * (time.monotonic() - since) + 4)
                return found

            r.wait_for("the first frame", sent)
            # The bucket leaks from now on. The load offers more.
            first = time.monotonic()
            r.wait_for("the burst is over", lambda: sent() >= 0.99 * (10_000 + 1000 * (time.monotonic() - first)))
            for _ in range(4):
                time.sleep(0.5)
                sent()


@pytest.mark.paced
def test_a_burst_lasts_as_long_as_it_may(rig):
    with Ports(rig, "lasts", BURST) as ports, ports.load("source", *FAST):
        since = time.monotonic()
        r.wait_for("a burst", lambda: ports.total(f"{TX}-packets") >= 10_000)
        lasted = time.monotonic() - since
        needs_cpu(lasted < 4, f"the burst has taken {lasted} s, instead of 2 s")
        time.sleep(1)
        # What the burst has left may pass, too: `test_a_burst_ends` has the upper bound.
        passed = ports.rate(f"{TX}-packets")
        at_least("after the burst", passed.count, 1000 * passed.shortest_s)


def fast(ports, key, wanted):
    """Wait until more frames than that pass in a second."""
    r.wait_for(f"more than {wanted} frames in a second", lambda: ports.rate(key, seconds=0.5, settle_s=0.1).per_second() > wanted)


@pytest.mark.paced
@pytest.mark.parametrize("mode", ["source", "sink"])
def test_limits_are_set_and_lifted_under_load(rig, mode):
    key = f"{TX if mode == 'source' else RX}-packets"
    with Ports(rig, f"set-{mode}") as ports, ports.load(mode, "--rate", "20k", key=key) as load:
        fast(ports, key, 12_000)
        for wanted in (1000, 4000):
            ports.cli("limit", "vm0", "--pps", str(wanted))
            ports.held_back()
            close(f"--pps {wanted}", ports.rate(key, seconds=3), wanted)
            r.require(f"pps {wanted}" in ports.cli("limit", "vm0").stdout, ports.cli("limit", "vm0").stdout)
        ports.cli("limit", "vm0", "--bps", "1", "--pps", "1")
        ports.held_back()
        below("nothing passes", ports.rate(key, seconds=1), 1)
        since = time.monotonic()
        used = [w["cpu-time-us"] for w in ports.status()["workers"]]
        time.sleep(2)
        used = [w["cpu-time-us"] - before for w, before in zip(ports.status()["workers"], used)]
        lasted = time.monotonic() - since
        r.require(max(used) < 100_000 * lasted, f"a queue that waits uses {used} us of {lasted:.1f} s")
        ports.cli("limit", "vm0", "--off")
        fast(ports, key, 12_000)
        r.require("no limits" in ports.cli("limit", "vm0").stdout, "limits are left")
        r.require(load.running(), load.tail())


@pytest.mark.paced
@pytest.mark.parametrize("mode", ["source", "sink"])
def test_a_queue_that_moves_keeps_its_budget(rig, mode):
    key = f"{TX if mode == 'source' else RX}-packets"
    with Ports(rig, f"moves-{mode}", "limits.pps=4000") as ports, ports.load(mode, *FAST, key=key) as load:
        others = [ports.worker_new(), ports.worker_new()]
        turn = itertools.cycle(others)

        def move():
            ports.attach("vm0:0-1", next(turn))
            time.sleep(0.1)

        moving = r.Repeating(move)
        passed = ports.rate(key, enough=lambda: moving.error or moving.turns > 5)
        moving.stop()
        close("while the queues move", passed, 4000)
        r.require(load.running(), load.tail())


@pytest.mark.paced
@pytest.mark.parametrize("way", [TX, RX])
def test_members_of_a_group_share_alike(rig, way):
    """One sends frames of 64 bytes, the other of 1514. A third port has no limits."""
    key, mode = f"{way}-packets", MODES[way]
    with Ports(rig, f"group-{way}", "limits.pps=4000,limits.group=tenant", "limits.group=tenant", ports=3, pairs=1) as ports:
        with contextlib.ExitStack() as loads:
            for at, (length, rate) in enumerate([("64", "15k"), ("1514", "15k"), ("64", "3k")]):
                loads.enter_context(ports.load(mode, "--rate", rate, "--size", length, at=at, key=key))
            ports.cli("attach", "vm1:0", str(ports.worker_new()))
            first, second, third = ports.counted(*((key, at) for at in range(3)))
            close("all of the group", Counted(first.count + second.count, *first[1:]), 4000)
            alike("the one and the other", first.count, second.count, 10)
            at_least("the port without limits", third.per_second(), 3000)
        table = ports.cli("status").stdout
        r.require(table.count("tenant") == 2 and "pps 4000" in table, table)
        with ports.load(mode, *FAST, at=1):
            close("alone in its group", ports.rate(key, 1), 4000)


@pytest.mark.paced
def test_receivers_of_a_switch_share_alike(rig):
    with Ports(rig, "receivers", "", "limits.pps-rx=4000,limits.group=g", "limits.group=g", switched=True, ports=3, pairs=1) as ports:
        with ports.load("sink", at=1), ports.load("sink", at=2), ports.load("source", "--rate", "12k"):
            first, second = ports.counted((f"{RX}-packets", 1), (f"{RX}-packets", 2))
            close("both", Counted(first.count + second.count, *first[1:]), 4000)
            alike("the one and the other", first.count, second.count, 10)


def hostile(nic):
    """Chains that are no frames: only a header, nothing at all, an empty indirect table, memory that is not the guest's."""
    ring = nic.rings[1]
    at = ring.room(64)
    yield lambda: ring.add([(at, c.HEADER, 0)])
    yield lambda: ring.add([(at, 0, 0)])
    yield lambda: ring.add([(at, c.HEADER, 0), (at, 0, 0), (at, 0, 0)])
    yield lambda: ring.add([(c.MEMORY + (1 << 40), 100, 0)])


@pytest.mark.paced
@pytest.mark.parametrize("switched", [False, True], ids=["tap", "switch"])
def test_chains_that_are_no_frames_pass_no_faster(rig, switched):
    """Each counts as a packet, and one that has to wait is there once."""
    with Ports(rig, f"hostile{int(switched)}", "limits.pps-tx=500", switched=switched, ports=2, pairs=1) as ports:
        with c.Nic(ports.sockets[0]) as nic:
            ring, kinds, done = nic.rings[1], itertools.cycle(hostile(nic)), 0
            since = time.monotonic()
            while time.monotonic() - since < 4:
                while len(ring.free) >= 3:
                    next(kinds)()
                ring.publish()
                while ring.pop(0.05) is not None:
                    done += 1
            passed = time.monotonic() - since
            close("chains", Counted(done, passed, passed), 500)
            drops = sum(sum(q["net"]["drops"].values()) for q in ports.list())
            r.require(done <= drops <= done + ring.size, f"{done} chains came back, and {drops} drops are counted")


def test_one_frame_at_a_time_is_not_lost_nor_doubled(rig):
    """Each frame waits for the limit: it is returned to the ring, and read again."""
    with Ports(rig, "whole", "limits.pps-tx=50", switched=True, ports=2, pairs=1) as ports:
        with c.Nic(ports.sockets[0]) as a, c.Nic(ports.sockets[1]) as b:
            number = 0
            # Until the limit has held some of them back, which it does if they come fast enough.
            # Each look at the daemon takes as long as some frames.
            end = time.monotonic() + r.WAIT_S
            while number % 60 or number == 0 or ports.list(0)[0]["limited-us"] <= 500_000:
                r.require(time.monotonic() < end, f"the limit was not met: {ports.list(0)}")
                b.fill(1, 2048)
                a.transmit(f.frame(number, 200, n.B_MAC, n.A_MAC))
                got = b.take()
                r.require(got is not None, f"frame {number} does not come")
                f.check(got[1], number, 200, n.B_MAC, n.A_MAC)
                number += 1
            r.require(ports.total(f"{TX}-packets", 0) == number, f"{ports.list(0)}")


def test_a_limited_guest_may_go_at_any_time(rig):
    """Killed, removed, its rings switched off; and the daemon ends at once."""
    with Ports(rig, "gone") as ports:
        for mode in ("source", "sink"):
            with ports.load(mode, *FAST):
                ports.cli("limit", "vm0", "--bps", "1")
                ports.held_back()
            ports.cli("limit", "vm0", "--off")
        with ports.load("echo", *FAST):
            ports.cli("limit", "vm0", "--pps", "1")
            ports.held_back()
            ports.cli("attach", "vm0:0-1", str(ports.worker_new()))
            ports.cli("quit", "--force")
            r.require(ports.child.wait() == 0, ports.child.tail())


WRONG = [
    (["--pps", "0"], "out of range"),
    (["--pps", "5K"], "--pps"),
    (["--pps-rx", "10", "--burst-pps-rx", "5"], "--burst-pps-rx 5 is less than"),
    (["--burst-bps-tx", "5"], "give --bps-tx too"),
    (["--bps", "10", "--pps-size", "1500"], "give --pps too"),
    (["--iops", "10"], "iops is a limit of disks", "give pps instead"),
    (["--bps-read", "10"], "bps-read is a limit of disks", "give bps-rx instead"),
    (["--group", "nobodys"], "no group nobodys", "--pps"),
    (["--bps", "10", "--group", "disks"], "group disks is of disks", "--group"),
    (["--group", "disks"], "group disks is of disks"),
]


def test_wrong_limits_are_refused(rig):
    with Ports(rig, "wrong") as ports:
        ports.cli("disk", "add", "name=d0,format=null,size=1G")
        disk = f"type=vhost-user-blk,name=d0,disk=d0,socket={rig.dir}/d0.sock"
        ports.cli("export", "add", f"{disk},limits.bps=5M,limits.group=disks")
        for arguments, *said in WRONG:
            r.message_of(ports.cli("limit", "vm0", *arguments, check=False), *said)
        r.message_of(ports.cli("limit", "d0", "--pps-tx", "5", check=False), "pps-tx is a limit of networks", "give iops-write instead")
        r.require("limits" not in next(e for e in ports.status()["exports"] if e["name"] == "vm0"), "a refused limit is there")
        for keys, *said in (["iops=5", "give pps instead"], ["pps=0", "out of range"], ["pps=5,engine=kernel", "leave out engine=kernel"]):
            export = f"type=vhost-user-net,name=x,net=vl0,socket={rig.dir}/x.sock,limits.{keys}"
            r.message_of(ports.cli("export", "add", export, check=False), *said)
        ports.cli("net", "add", "type=switch,name=s0")
        ports.cli("net", "add", "type=tap,name=up,ifname=vlup")
        uplink = "type=uplink,name=u0,net=s0,tap=up"
        r.message_of(ports.cli("export", "add", f"{uplink},limits.pps=5", check=False), "limits", "uplink")
        ports.cli("export", "add", uplink)
        r.message_of(ports.cli("limit", "u0", "--pps", "5", check=False), "u0 is an uplink")


def test_the_kernel_is_not_chosen_for_a_port_with_limits(rig):
    with Ports(rig, "auto", "engine=auto,limits.pps=100") as ports:
        export = ports.status()["exports"][0]
        r.require((export["engine"], export["engine-reason"]) == ("user", "the kernel has no limits"), f"{export}")


def test_limits_are_in_the_configuration(rig):
    with Ports(rig, "config") as ports:
        limits = {"pps-rx": 5000, "bps": 1 << 30, "burst-bps": "2147483648:3s", "pps-size": 1514, "group": "g"}
        ports.cli("qmp", "export-limit", json.dumps({"name": "vm0", "limits": limits}))
        export = json.loads(ports.cli("qmp", "query-exports").stdout)[0]
        r.require(export["limits"] == limits, f"{export}")
        shown = ports.cli("config", "show").stdout
        r.require("[export.limits]" in shown and "pps-rx = 5000" in shown, shown)
        file = rig.dir / "again.toml"
        file.write_text(shown.replace("config.ctl", "again.ctl"))
        ports.cli("config", "check", str(file))
        line = next(line for line in ports.cli("status").stdout.splitlines() if line.startswith("vm0 ") and "pps-rx" in line)
        for word in ("g", "pps-rx 5000", "bps 1G+2G:3s", "pps-size 1514"):
            r.require(word in line, f"{word} is not in: {line}")
