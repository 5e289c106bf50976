"""Bad input: a clear error, nothing left behind, other exports unharmed.

From users: files, sizes, numbers and names that are wrong. From front ends: messages that no sane
front end sends, while a second export serves a load that verifies what it reads.
"""

import peer as p
import pytest
import rig as r


class Served:
    """A daemon with two exports of worker 0: vm0 for the tests, and vm1 with a verified load."""

    def __init__(self, rig):
        self.rig = rig
        self.sockets = {name: rig.dir / f"{name}.sock" for name in ("vm0", "vm1")}
        self.socket = self.sockets["vm0"]
        argv = []
        for disk in ("d0", "d1"):
            argv += ["--disk", f"name={disk},file={rig.image(f'{disk}.img', 64 << 20)}"]
        for name, socket in self.sockets.items():
            argv += ["--export", f"type=vhost-user-blk,name={name},disk={'d' + name[2:]},socket={socket},queues=2"]
        self.daemon = r.Daemon(rig, *argv)
        self.load = r.Child(rig, "load", self.bench(r.FOREVER, "--iodepth", "4", "--bs", "4k", "--flush-every", "16"))
        r.wait_for("the load on vm1 connects", lambda: self.export("vm1")["connected"])
        self.begin = r.wait_for("the load on vm1 runs", self.requests)

    def bench(self, time, *more):
        argv = [r.binary("vshunt-bench"), "blk", "--socket", self.sockets["vm1"], "--rw", "randrw", "--verify", "--queues", "2"]
        return [*argv, "--runtime", time, "--quiet", *more]

    def export(self, name):
        return next(e for e in self.daemon.status()["exports"] if e["name"] == name)

    def requests(self):
        """Requests of vm1 so far."""
        return sum(q["requests"] for q in self.daemon.status()["queues"] if q["export"] == "vm1")

    def sane(self):
        """A sane front end is served by vm0."""
        with p.Peer(self.socket) as c:
            status = c.serve()
            r.require(status == 0, f"a sane request ended with status {status}")

    def unharmed(self):
        """The load has read nothing wrong, and the daemon ends well."""
        r.require(self.requests() > self.begin, "no request of vm1 was served meanwhile")
        code = self.load.interrupt()
        r.require(code == 0, f"the load on vm1 ended with {code}: {self.load.tail()}")
        errors = [q for q in self.daemon.status()["queues"] if q["export"] == "vm1" and q["errors"]]
        r.require(not errors, f"requests of vm1 failed: {errors}")
        r.run(self.bench("2s"))
        child = self.daemon.child
        r.require(child.stop() == 0, f"the daemon ended with {child.process.returncode}: {child.tail()}")
        for socket in self.sockets.values():
            r.require(not socket.exists(), f"{socket.name} was left behind")


@pytest.fixture(scope="module")
def served(rig):
    """The daemon and the load of a file. Its last test calls `served.unharmed()`."""
    return Served(rig)


@pytest.fixture
def c(served):
    """A front end's connection to vm0. Afterwards the daemon must serve a sane front end."""
    with p.Peer(served.socket) as connection:
        yield connection
    r.require(served.daemon.child.running(), f"the daemon ended: {served.daemon.child.tail()}")
    served.sane()
