"""Runs net_guest as a load: frames in both directions until it is stopped.

It checks the order of each flow, reconnects with its in-flight region, and counts its receive
buffers at the end.
"""

import contextlib
import subprocess

import net_rig as n
import rig as r

PAIRS = 4
# The largest number of frames of net_guest that are on their way at a time.
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
        """Stops the load. Returns the frames sent and lost, to the guest and from the guest."""
        self.tell("stop")
        code = self.child.wait()
        r.require(code == 0, f"net_guest ended with {code}: {self.child.tail()}; {self.daemon.child.tail()}")
        last = self.child.output().splitlines()[-1].split()
        r.require(last[0] == "traffic", f"{last}")
        return (int(last[2]), int(last[3])), (int(last[5]), int(last[6]))


@contextlib.contextmanager
def daemon(rig, name, workers="per-queue", kept=False):
    """A daemon with a network device on vs0. `kept`: the tap exists before the daemon, and outlives a kill."""
    if kept:
        n.ip("tuntap", "add", "dev", "vs0", "mode", "tap", "multi_queue", "vnet_hdr")
        n.ip("link", "set", "vs0", "mtu", n.MTU, "up")
    try:
        with n.Net(rig, name, pairs=PAIRS, workers=workers) as made:
            yield made
    finally:
        if kept:
            n.ip("link", "del", "vs0")
