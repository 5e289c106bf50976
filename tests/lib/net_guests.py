"""Guests joined by a switch, each played by `vshunt-bench net`."""

import json

import rig as r

PAIRS = 2


class Switch:
    """A daemon with a switch and so many guests' NICs."""

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
        """Counters of a guest's queues: packets to it, from it, and drops by reason."""
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
        self.daemon.cli("quit", "--force")
        r.require(self.daemon.child.wait() == 0, self.daemon.child.tail())
        r.require("panicked" not in self.daemon.child.output(), self.daemon.child.tail())


def result(child, interrupt=True):
    """The JSON of a run; wrong frames are its failure."""
    code = child.interrupt() if interrupt else child.wait()
    text = child.output()
    r.require(code == 0, f"vshunt-bench ended with {code}: {child.tail()}")
    return json.JSONDecoder().raw_decode(text[text.index("{\n") :])[0]
