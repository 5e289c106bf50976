"""Guests joined by a switch: `vshunt-bench net` plays each of them. Frames arrive whole, once and in order, with rings of every
kind, while queues move; a guest that takes nothing, or is gone, harms nobody else."""

import json
import random
import time

import rig as r

FRAMES = 20_000
SEED = 12
PAIRS = 2
# What both ends of a pair are: the sender, the receiver.
SHAPES = {
    "split": ([], []),
    "packed": (["--packed"], ["--packed"]),
    "packed to split without merged buffers": (["--packed"], ["--no-mrg", "--no-event-idx", "--no-indirect"]),
    "offloads": (["--offloads", "--size", "60-60000"], ["--offloads", "--size", "60-60000"]),
    "offloads to a guest that has none": (["--offloads", "--size", "60-1514"], ["--size", "60-1514"]),
}


class Switch:
    """A daemon with a switch and so many guests' cards."""

    def __init__(self, rig, name, guests=2, more=()):
        self.rig, self.name = rig, name
        self.sockets = [rig.dir / f"{name}{i}.sock" for i in range(guests)]
        argv = ["--net", "name=s0,type=switch"]
        for i, socket in enumerate(self.sockets):
            argv += ["--export", f"type=vhost-user-net,name=e{i},net=s0,socket={socket},queues={PAIRS},workers=per-queue"]
        self.daemon = r.Daemon(rig, *argv, *more, name=name)

    def load(self, guest, mode, *more):
        """A guest, until it is told to end."""
        argv = [r.binary("vshunt-bench"), "net", "--socket", self.sockets[guest], "--mode", mode, "--quiet", "--json"]
        argv += ["--verify", "--flows", "64", "--queues", PAIRS]
        if "--frames" not in more:
            argv += ["--runtime", r.FOREVER]
        return r.Child(self.rig, f"{self.name}-{guest}-{mode}", [*argv, *more])

    def counters(self, guest):
        """What went through a guest's queues: packets to it, from it, and drops by reason."""
        status = json.loads(self.daemon.cli("status", "--json").stdout)
        export = next(e for e in status["exports"] if e["name"] == f"e{guest}")
        nets = [q["net"] for q in export["queue-list"] if "net" in q]
        drops = {}
        for net in nets:
            for why, count in net["drops"].items():
                drops[why] = drops.get(why, 0) + count
        return sum(n["to-guest-packets"] for n in nets), sum(n["from-guest-packets"] for n in nets), {w: n for w, n in drops.items() if n}

    def ready(self, guest, child):
        """Waits until a guest takes frames."""

        def running():
            r.require(child.running(), f"the guest ended: {child.tail()}")
            lines = self.daemon.cli("status").stdout.splitlines()
            return sum(line.startswith(f"e{guest}:") and " running " in line for line in lines) == PAIRS

        r.wait_for(f"guest {guest}", running)

    def end(self):
        self.daemon.cli("quit")
        r.require(self.daemon.child.wait() == 0, self.daemon.child.tail())
        r.require("panicked" not in self.daemon.child.output(), self.daemon.child.tail())


def result(child, interrupt=True):
    """The JSON of a run; wrong frames are its failure."""
    code = child.interrupt() if interrupt else child.wait()
    text = child.output()
    r.require(code == 0, f"vshunt-bench ended with {code}: {child.tail()}")
    return json.JSONDecoder().raw_decode(text[text.index("{\n") :])[0]


def shapes(rig):
    for name, (sender, receiver) in SHAPES.items():
        switch = Switch(rig, "sw")
        sink = switch.load(1, "sink", *receiver)
        switch.ready(1, sink)
        sent = result(switch.load(0, "source", "--frames", str(FRAMES), *sender), interrupt=False)["sent"]["frames"]
        done = result(sink)
        got, check = done["received"], done["check"]
        dropped = sum(switch.counters(0)[2].values())
        r.require(sent == FRAMES, f"{name}: {sent} frames sent")
        # What the guest had when it was told to end, whether it has looked at all of it or not.
        r.require(switch.counters(1)[0] + dropped >= FRAMES and check["damaged"] == 0, f"{name}: {done}, {dropped} dropped")
        r.require(got["frames"] > 0, f"{name}: nothing arrives")
        switch.end()


def moved(rig):
    """Queues of both guests move between workers under traffic: a switch on which both know each other."""
    switch = Switch(rig, "sm")
    echo = switch.load(1, "echo")
    switch.ready(1, echo)
    source = switch.load(0, "source", "--rate", "20k")
    workers = [0, switch.daemon.worker_new(), switch.daemon.worker_new()]
    chance = random.Random(SEED)
    for _ in range(40):
        switch.daemon.cli("attach", f"e{chance.randrange(2)}:{chance.randrange(PAIRS)}", chance.choice(workers))
        time.sleep(chance.uniform(0.0, 0.05))
    before = switch.counters(1)[0]
    r.wait_for("frames after the moves", lambda: switch.counters(1)[0] > before + 100)
    nets = json.loads(switch.daemon.cli("net", "list", "--json").stdout)
    r.require(nets[0]["addresses"] == 2, f"{nets}")
    sent, done = result(source)["sent"]["frames"], result(echo)
    got, check = done["received"], done["check"]
    r.require(check["damaged"] == 0 and check["late"] == 0, f"{done}")
    lost = sum(switch.counters(0)[2].values())
    r.require(switch.counters(1)[0] + lost >= sent, f"{got['frames']} of {sent} frames, {lost} dropped")
    switch.end()


def silent(rig):
    """One guest of three is stopped, then killed; frames for it hold nobody up."""
    switch = Switch(rig, "sh", guests=3)
    dead, sink = switch.load(1, "sink"), switch.load(2, "sink")
    switch.ready(1, dead)
    switch.ready(2, sink)
    dead.suspend()
    # Nobody has said where its address is: all go to both.
    source = switch.load(0, "source")
    for step in ("stopped", "killed"):
        before = switch.counters(2)[0]
        r.wait_for(f"frames for the third while the second is {step}", lambda: switch.counters(2)[0] > before + 5000)
        if step == "stopped":
            # All that waits for it is fetched back for this.
            switch.daemon.cli("attach", "e0:0", "0")
            dead.kill()
    check = result(sink)["check"]
    r.require(check["damaged"] == 0 and check["late"] == 0, f"{check}")
    result(source)
    switch.end()


def killed(rig):
    """Guests go on with the next daemon after a kill -9."""
    switch = Switch(rig, "sk")
    sink = switch.load(1, "sink", "--reconnect", "120s")
    switch.ready(1, sink)
    source = switch.load(0, "source", "--reconnect", "120s", "--rate", "20k")
    for _ in range(2):
        r.wait_for("frames", lambda: switch.counters(1)[0] > 100)
        switch.daemon.child.kill()
        switch.daemon.start()
    r.wait_for("frames after the last kill", lambda: switch.counters(1)[0] > 100)
    done, got = result(source), result(sink)
    r.require(done["reconnects"] and got["reconnects"] and got["check"]["damaged"] == 0, f"{done} {got}")
    switch.end()


def refused(rig):
    """What a switch is not."""
    switch = Switch(rig, "se")
    for words, arguments in (
        (["ifname", "type=tap"], ("net", "add", "type=switch,name=s1,ifname=vs9")),
        (["e0"], ("net", "remove", "s0")),
        (["engine=kernel"], ("export", "add", f"type=vhost-user-net,name=e9,net=s0,socket={rig.dir}/e9.sock,engine=kernel")),
        (["switch"], ("net", "set", "s0", "--steering", "rss")),
    ):
        r.message_of(switch.daemon.cli(*arguments, check=False), *words)
    switch.daemon.cli("export", "remove", "e1")
    switch.daemon.cli("export", "remove", "e0")
    switch.daemon.cli("net", "remove", "s0")
    switch.end()


def tests(rig):
    rig.test("switch: frames from guest to guest, rings of every kind", lambda: shapes(rig))
    rig.test("switch: queues move between workers under traffic", lambda: moved(rig))
    rig.test("switch: a guest that takes nothing holds nobody up", lambda: silent(rig))
    rig.test("switch: kill -9 under traffic", lambda: killed(rig))
    rig.test("switch: what is refused", lambda: refused(rig))
