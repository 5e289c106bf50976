"""Frames both ways while queues are moved between workers, pairs are switched, and the daemon is killed.

net_guest keeps the order of each flow, reconnects with its in-flight region, and counts its receive buffers at the end.
"""

import random
import subprocess
import time

import net_rig as n
import rig as r

PAIRS = 4
MOVES, SWITCHES, KILLS = 60, 24, 8
# Frames that net_guest has on their way at most.
WINDOW = 150
SEED = 17


class Load:
    """net_guest with `traffic`."""

    def __init__(self, rig, daemon, name, *words, pairs=PAIRS):
        argv = [n.net_guest(), daemon.socket, "vs0", pairs, SEED, "user", "traffic", *words]
        self.daemon = daemon
        self.child = r.Child(rig, f"load-{name}", argv, stdin=subprocess.PIPE)
        self.answers = 0
        r.wait_for("traffic begins", lambda: "begins" in self.child.output() or self.ended())
        self.progress()

    def ended(self):
        if not self.child.running():
            raise r.Failed(f"net_guest ended with {self.child.process.returncode}: {self.child.tail()}; {self.daemon.child.tail()}")
        return False

    def tell(self, line):
        self.child.process.stdin.write(f"{line}\n".encode())
        self.child.process.stdin.flush()

    def switch(self, pair, on):
        self.answers += 1
        self.tell(f"{'on' if on else 'off'} {pair}")
        r.wait_for("the guest switches a pair", lambda: self.child.output().count("done") >= self.answers or self.ended())

    def progress(self):
        """Waits until frames went both ways."""

        def counts():
            nets = self.daemon.counters().values()
            return [sum(c[way] for c in nets) for way in ("to-guest-packets", "from-guest-packets")]

        before = counts()
        r.wait_for("frames go both ways", lambda: self.ended() or all(b > a + 20 for a, b in zip(before, counts())))

    def end(self):
        """What was sent and lost: to the guest, from the guest."""
        self.tell("stop")
        code = self.child.wait()
        r.require(code == 0, f"net_guest ended with {code}: {self.child.tail()}; {self.daemon.child.tail()}")
        last = self.child.output().splitlines()[-1].split()
        r.require(last[0] == "traffic", f"{last}")
        return (int(last[2]), int(last[3])), (int(last[5]), int(last[6]))


def moved(rig, kind, words, daemon):
    """Queues are moved, workers come and go: nothing is lost."""
    load = Load(rig, daemon, f"moved-{kind}", *words)
    chance = random.Random(SEED)
    first = sorted({q["worker"] for q in daemon.queues().values()})
    more = [daemon.worker_new() for _ in range(2)]
    for move in range(MOVES):
        daemon.cli("attach", f"c0:{chance.randrange(PAIRS)}", chance.choice([*first, *more]))
        if move % 15 == 14:
            at = {q["worker"] for q in daemon.queues().values()}
            for worker in [w for w in more if w not in at]:
                daemon.cli("worker", "free", worker)
                more.remove(worker)
            more.append(daemon.worker_new())
    load.progress()
    to, back = load.end()
    drops = daemon.drops()
    r.require(to[1] == back[1] == 0 and not drops, f"lost of frames to the guest {to}, from it {back}; counted {drops}")
    daemon.end()
    rig.say(f"{kind}: {MOVES} moves, {to[0]} frames to the guest, {back[0]} from it")


def switched(rig, kind, words, daemon):
    """Pairs are switched off and on: what is lost is counted."""
    load = Load(rig, daemon, f"switched-{kind}", *words)
    chance = random.Random(SEED)
    off = set()
    for _ in range(SWITCHES):
        pair = chance.randrange(1, PAIRS)
        load.switch(pair, pair in off)
        off ^= {pair}
        time.sleep(chance.uniform(0, 0.05))
    for pair in sorted(off):
        load.switch(pair, True)
    load.progress()
    # Stopping the rings, which counts what waits for buffers, comes after the last frame.
    to, back = load.end()
    drops = daemon.drops()
    rig.say(f"{kind}: {SWITCHES} switches, {to[0]} frames to the guest, {to[1]} lost; counted: {drops}")
    r.require(back[1] == 0, f"{back[1]} of {back[0]} frames from the guest are lost")
    counted = sum(drops.values())
    # What comes between our last look into a queue and its detaching is thrown away by the kernel, which does not say so.
    uncounted = to[1] - counted
    r.require(0 <= uncounted <= WINDOW, f"{to[1]} of {to[0]} frames to the guest are lost, and {counted} counted: {drops}")
    daemon.end()


def killed(rig, kind, words, daemon):
    """kill -9, again and again. The tap is not the daemon's own, and stays."""
    load = Load(rig, daemon, f"killed-{kind}", *words)
    chance = random.Random(SEED)
    for _ in range(KILLS):
        time.sleep(chance.uniform(0, 0.2))
        daemon.child.kill()
        time.sleep(chance.uniform(0, 0.1))
        daemon.start()
        load.progress()
    to, back = load.end()
    r.require(f"# {KILLS} reconnects" in load.child.output(), load.child.tail())
    drops = daemon.drops()
    rig.say(f"{kind}: {KILLS} kills, to the guest {to[0]} frames and {to[1]} lost, from it {back[0]} and {back[1]} lost; {drops}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def with_daemon(rig, body, kind, words):
    """`body` with a daemon whose tap is gone afterwards."""
    kept = body.__name__ == "killed"
    if kept:
        n.ip("tuntap", "add", "dev", "vs0", "mode", "tap", "multi_queue", "vnet_hdr")
        n.ip("link", "set", "vs0", "mtu", n.MTU, "up")
    try:
        with n.Net(rig, f"{body.__name__}-{kind}", pairs=PAIRS, workers="2" if body is moved else "per-queue") as daemon:
            body(rig, kind, words, daemon)
    finally:
        if kept:
            n.ip("link", "del", "vs0")


def tests(rig):
    for kind, words in (("split", []), ("packed", ["packed"]), ("plain", ["plain"])):
        for name, body in (
            (f"{MOVES} moves of queues", moved),
            (f"{SWITCHES} times a pair is switched", switched),
            (f"{KILLS} times kill -9", killed),
        ):
            rig.test(f"net: {name} under traffic ({kind})", lambda a=(body, kind, words): with_daemon(rig, *a))
