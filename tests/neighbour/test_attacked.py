"""Tests front ends that break every rule at random, beside a verified load on the same worker.

Attackers (tests/lib/neighbour_attack.py) connect to two disks and two network devices of a
switch, for 20 s (`--seconds`) with each seed. The load loses no request, and reads no wrong byte.
After the attackers have ended, the daemon has as many descriptors, mappings and threads as before,
and no more memory. It serves correct front ends on each of the attacked exports. On a machine with
a CPU to spare, no request of the load takes more than a second.

The tests run in order. `VSHUNT_SEED` sets the seed.
"""

import json
import os
import random
import re
import sys
import time
from pathlib import Path

import net_frames as f
import net_peer as c
import peer as p
import pytest
import rig as r
from stalls import Stalls

# Attacked exports, by name: of disks, and of a switch's NICs.
DISKS, NICS = ("a0", "a1"), ("c0", "c1")
ATTACKERS = 4
WARM_UP_S = 5
SECONDS = 20.0
# Seeds that found something once.
SEEDS = [int(os.environ["VSHUNT_SEED"])] if os.environ.get("VSHUNT_SEED") else [5, 7]
# The longest time that a request of the load may take, besides stalls of the machine.
LATE_S = 1.0
# What memory may be more than before: allocators keep some of what was freed.
RSS_SLACK = 32 << 20
# How many mappings without a name may be more: the C library keeps up to eight arenas a CPU, of two
# mappings each, and stacks of threads that ended, up to 40 MiB, each of 2 MiB beside a page that
# guards it. Memory of front ends has a name.
ANONYMOUS_SLACK = 2 * 8 * (os.cpu_count() or 1) + 2 * 20


class Neighbour:
    """A daemon with the attacked exports, and the export vm0 with a verified load."""

    def __init__(self, rig, memory, seconds, name="vshunt"):
        """`name`: of its files."""
        self.rig, self.seconds, self.name = rig, seconds, name
        # Set by the warm-up.
        self.before = None
        self.sockets = {export: rig.dir / f"{name}-{export}.sock" for export in ("vm0", *DISKS, *NICS)}
        thin = memory / f"{name}-a1.img"
        r.run([r.binary("vshunt"), "image", "create", "-q", "-f", "qcow2", thin, "16M"])
        argv = [
            *("--disk", f"name=d0,file={rig.image(f'{name}-vm0.img', 64 << 20, memory)}"),
            *("--disk", f"name=a0,file={rig.image(f'{name}-a0.img', 16 << 20, memory)}", "--disk", f"name=a1,format=qcow2,file={thin}"),
            *("--net", "type=switch,name=s0"),
            *("--export", f"type=vhost-user-blk,name=vm0,disk=d0,queues=2,socket={self.sockets['vm0']}"),
        ]
        for disk in DISKS:
            argv += ["--export", f"type=vhost-user-blk,name={disk},disk={disk},queues=2,socket={self.sockets[disk]}"]
        for nic in NICS:
            argv += ["--export", f"type=vhost-user-net,name={nic},net=s0,queues=2,socket={self.sockets[nic]}"]
        self.daemon = r.Daemon(rig, *argv, name=name)
        workers = {q["worker"] for q in self.daemon.status()["queues"]}
        r.require(workers == {0}, f"the queues are not all on one worker: {workers}")
        self.result = rig.dir / f"{name}-load.json"
        with open(self.result, "wb") as out:
            self.load = r.Child(
                rig,
                f"{name}-load",
                [
                    *(r.binary("vshunt-bench"), "blk", "--socket", self.sockets["vm0"], "--rw", "randrw", "--verify"),
                    *("--queues", "2", "--iodepth", "4", "--bs", "4k", "--flush-every", "16", "--runtime", r.FOREVER),
                    *("--quiet", "--json", "--seed", SEEDS[-1] % 2**32, "--stall", f"{r.WAIT_S:g}s"),
                ],
                stdout=out,
            )
        r.wait_for("the load runs", lambda: self.requests("vm0") > 1000)

    def requests(self, export):
        """Requests of an export so far."""
        self.both_live()
        return sum(q["requests"] for q in self.daemon.status()["queues"] if q["export"] == export)

    def both_live(self):
        daemon, load = self.daemon.child, self.load
        r.require(daemon.running(), f"the daemon ended with {daemon.process.returncode}: {daemon.tail()}")
        r.require(load.running(), f"the load ended with {load.process.returncode}: {load.tail()}")

    def values(self):
        """Descriptors, mappings with a name and without, threads, and bytes of memory of the daemon."""
        proc = Path(f"/proc/{self.daemon.child.pid}")
        names = [name for _, name in r.threads(self.daemon.child.pid, "comm")]
        mappings = (proc / "maps").read_text().splitlines()
        # Range, rights, offset, device, file number, and a name or none.
        named = sum(len(mapping.split(maxsplit=5)) == 6 for mapping in mappings)
        return {
            "descriptors": len(os.listdir(proc / "fd")) - len(r.receivers(self.daemon.child.pid)),
            "mappings": named,
            "anonymous": len(mappings) - named,
            # The kernel makes and ends those of io-wq by itself.
            "threads": sum(not name.startswith("iou-") for name in names),
            "memory": int(re.search(r"^VmRSS:\s+(\d+) kB", (proc / "status").read_text(), re.M)[1]) << 10,
        }

    def quiet_values(self):
        """The minimum of each value within a second, which leaves out short peaks."""
        seen = [self.values()]
        for _ in range(20):
            time.sleep(0.05)
            seen.append(self.values())
        return {name: min(v[name] for v in seen) for name in seen[0]}

    def keep_lists(self, name):
        """Stores the lists of mappings and descriptors in the rig's folder.

        They show the place of a leak.
        """
        proc = Path(f"/proc/{self.daemon.child.pid}")
        links = sorted((int(fd.name), os.readlink(fd)) for fd in (proc / "fd").iterdir())
        text = "".join(f"{fd} {link}\n" for fd, link in links) + (proc / "maps").read_text()
        (self.rig.dir / f"{self.name}-{name}.txt").write_text(text)

    def attack(self, name, seed, seconds):
        """Runs attackers for this time. Returns the sum of their counts."""
        paths = [str(self.sockets[disk]) for disk in DISKS] + [f"net:{self.sockets[nic]}" for nic in NICS]
        script = r.ROOT / "tests/lib/neighbour_attack.py"
        argv = [sys.executable, "-B", script]
        children = [r.Child(self.rig, f"{self.name}-{name}-{k}", [*argv, f"{seed}/{k}", seconds, *paths]) for k in range(ATTACKERS)]
        end = time.monotonic() + seconds + r.WAIT_S
        while any(child.running() for child in children):
            self.both_live()
            r.require(time.monotonic() < end, f"attackers did not end {r.WAIT_S:g} s after their time")
            time.sleep(0.1)
        total = {}
        for child in children:
            r.require(child.process.returncode == 0, f"{child.name} ended with {child.process.returncode}: {child.tail()}")
            for what, count in json.loads(child.output().splitlines()[-1]).items():
                total[what] = total.get(what, 0) + count
        return total

    def settled(self, before):
        """Wait until the daemon has no more of anything than before."""
        slack = {"memory": RSS_SLACK, "anonymous": ANONYMOUS_SLACK}
        now = {}

        def back():
            self.both_live()
            now.update(self.values())
            return all(now[name] <= before[name] + slack.get(name, 0) for name in before)

        try:
            r.wait_for("the daemon has what it had before", back)
        except r.Failed as e:
            self.keep_lists("after")
            raise r.Failed(f"{e}: before {before}, now {now}") from e

    def gone(self):
        """Wait until each attacked export has seen the end of its last front end."""

        def none():
            self.both_live()
            return not any(e["connected"] for e in self.daemon.status()["exports"] if e["name"] != "vm0")

        r.wait_for("the attacked exports are free", none)

    def warm_up(self):
        """A short attack, once. After it, allocators and pools have reached their lasting size."""
        if self.before is not None:
            return
        self.cold = self.quiet_values()
        self.attack("warm-up", "warm-up", WARM_UP_S)
        self.gone()
        # Descriptors and threads have no such reason.
        self.exact = {name: self.cold[name] for name in ("descriptors", "threads")}
        self.settled(self.exact)
        self.before = {**self.quiet_values(), **self.exact}
        self.keep_lists("before")

    def attacked(self, seed):
        """The attack, and the state of the daemon after it."""
        served = {name: self.requests(name) for name in ("vm0", *DISKS, *NICS)}
        done = self.attack(f"attack-{seed}", seed, self.seconds)
        self.rig.say(" ".join(f"{what}={count}" for what, count in sorted(done.items())))
        # On a slow machine that was not enough for each of the exports.
        for more in range(10):
            if all(self.requests(name) > count for name, count in served.items()):
                break
            self.attack(f"attack-{seed}-{more}", f"{seed}/more/{more}", WARM_UP_S)
        self.gone()
        self.settled(self.before)
        self.rig.say(f"cold {self.cold}, warm {self.before}, now {self.values()}")
        for name, count in served.items():
            r.require(self.requests(name) > count, f"no request of {name} was served meanwhile")
        r.wait_for("no worker stands still", lambda: not any(w["stalled"] for w in self.daemon.status()["workers"]))

    def disks_serve(self):
        """A sane front end reads a sector of each attacked disk."""
        for name in DISKS:
            with p.Peer(self.sockets[name]) as front:
                r.require(front.handshake() == p.ACCEPTED and front.memory() == p.ACCEPTED, f"{name} refuses a sane front end")
                kick, _ = front.ring()
                front.describe_read()
                front.offer(0, kick)
                r.wait_for(f"a request of {name} is done", lambda front=front: front.used() == 1)
                r.require(front.ram[p.DATA + 8192] == 0, f"a read of {name} ended with status {front.ram[p.DATA + 8192]}")

    def nics_serve(self):
        """A frame passes from each attacked NIC to the other."""
        nics = [c.Nic(self.sockets[name]) for name in NICS]
        with nics[0], nics[1]:
            for nic in nics:
                nic.fill(8, 2048)
            for number, (nic, other) in enumerate((nics, nics[::-1])):
                sent = f.frame(number, 500, b"\xff" * 6, bytes((0x52, 0x54, 0, 0, 1, number)))
                nic.transmit(sent)
                got = other.take(wait_s=r.WAIT_S)
                r.require(got is not None and got[1] == sent, f"the frame from {NICS[number]} does not come: {got}")

    def unharmed(self):
        """Ends the load and the daemon. Nothing is lost, and nothing is wrong. Returns the load's result."""
        code = self.load.interrupt(120)
        r.require(code == 0, f"the load ended with {code}: {self.load.tail()}")
        result = json.loads(self.result.read_text())
        r.require(result["verified_blocks"] > 0 and result["reconnects"] == 0, f"{result}")
        errors = [q for q in self.daemon.status()["queues"] if q["export"] == "vm0" and q["errors"]]
        r.require(not errors, f"requests of the load failed: {errors}")
        r.require(self.daemon.child.stop() == 0, f"the daemon ended with {self.daemon.child.process.returncode}: {self.daemon.child.tail()}")
        return result

    def in_time(self, result, stalls):
        """No request of the load was late."""
        longest_s = max(result[kind]["latency_ns"]["max"] for kind in ("read", "write", "flush")) / 1e9
        if result["slow_ios"] > len(result["slow"]):
            raise r.Late(f"{result['slow_ios']} requests took more than half a second")
        over = [(io["end_ns"] / 1e9, io["latency_ns"] / 1e9) for io in result["slow"] if io["latency_ns"] > LATE_S * 1e9]
        late = [took for end, took in over if took - stalls.within(end - took, end) > LATE_S]
        self.rig.say(
            f"{result['iops']:.0f} requests/s, the longest took {longest_s:.3f} s; {len(over) - len(late)} that took more than "
            f"{LATE_S:g} s do not count, since the machine stood still meanwhile"
        )
        if late:
            raise r.Late(f"{len(late)} requests were late: {late[:8]} s")


@pytest.fixture(scope="module")
def neighbour(request, rig, memory):
    return Neighbour(rig, memory, request.config.getoption("--seconds") or SECONDS)


def test_a_short_attack_leaves_no_descriptors_and_threads_behind(neighbour):
    neighbour.warm_up()


@pytest.mark.parametrize("seed", SEEDS, ids="seed {}".format)
def test_an_attack_leaves_nothing_behind(neighbour, seed):
    neighbour.warm_up()
    neighbour.attacked(seed)


def test_the_attacked_disks_serve_a_sane_front_end(neighbour):
    neighbour.disks_serve()


def test_the_attacked_nics_serve_sane_front_ends(neighbour):
    neighbour.nics_serve()


def test_the_load_beside_them_lost_nothing(neighbour):
    neighbour.unharmed()


@pytest.mark.timed
def test_no_request_beside_an_attack_is_late(rig, memory):
    stalls = Stalls()
    own = Neighbour(rig, memory, SECONDS, name="late")
    own.attack("attack", SEEDS[0], own.seconds)
    own.in_time(own.unharmed(), stalls)


@pytest.mark.long
def test_an_attack_with_a_seed_by_chance(rig, memory, request):
    seed = random.SystemRandom().randrange(1000, 2**31)
    own = Neighbour(rig, memory, request.config.getoption("--seconds") or SECONDS, name="chance")
    rig.say(f"again: VSHUNT_SEED={seed} scripts/pytest --seconds {own.seconds:g} tests/neighbour")
    own.warm_up()
    own.attacked(seed)
    own.disks_serve()
    own.nics_serve()
    own.unharmed()
