"""Tests front ends whose process ends while their requests hang."""

import time

import pytest
import rig as r

pytestmark = pytest.mark.root

MIB = 1 << 20


@pytest.fixture
def hangs(rig, guarded):
    """A daemon with export vm0, whose disk is a file of another daemon that stands still; and a front end with requests."""
    guarded(180)
    file, socket = rig.dir / "below.mnt", rig.dir / "gone.sock"
    mount = f"type=fuse,name=f0,disk=d0,mountpoint={file},writable=on,passthrough=off"
    below = r.Daemon(rig, "--disk", f"name=d0,format=raw,file={rig.image('below.img', MIB)}", "--export", mount, name="below")
    export = f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket},queues=1"
    daemon = r.Daemon(rig, "--disk", f"name=d0,format=raw,file={file},direct=off", "--export", export, name="gone")
    load = r.Child(rig, "gone-load", [r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", "randread", "--quiet", "--runtime", r.FOREVER])
    queue = lambda: daemon.status()["queues"][0]  # noqa: E731
    r.wait_for("requests", lambda: queue()["requests"] > 0)
    below.child.suspend()
    r.wait_for("requests that hang", lambda: queue()["in-flight"] > 0)
    yield daemon, load, below
    below.child.resume()
    daemon.child.kill()
    r.require(below.child.stop() == 0, below.child.tail())


def gone(daemon, load):
    """The front end ends, which nobody has to notice first. Its device is its own until then."""
    for command in (("quit",), ("export", "remove", "vm0")):
        r.message_of(daemon.cli(*command, check=False), "vm0", "front end", "--force")
    load.kill()
    export = lambda: daemon.status()["exports"][0]  # noqa: E731
    r.wait_for("it has gone", lambda: export()["leaving"])
    r.require(export()["connected"], f"listed as {export()}")
    r.require(" leaving " in daemon.cli("status").stdout, daemon.cli("status").stdout)


def test_the_daemon_ends(hangs):
    daemon, load, below = hangs
    gone(daemon, load)
    ending = r.Child(daemon.rig, "quit", [r.binary("vshunt"), "-c", daemon.control, "quit"])
    # A refusal comes after one second.
    time.sleep(2)
    r.require(ending.running(), f"it is refused: {ending.tail()}")
    below.child.resume()
    r.require((ending.wait(), daemon.child.wait()) == (0, 0), f"{ending.tail()} {daemon.child.tail()}")


def test_the_export_is_removed(hangs):
    daemon, load, below = hangs
    gone(daemon, load)
    r.message_of(daemon.cli("export", "remove", "vm0", check=False), "vm0", "has requests that do not end")
    below.child.resume()
    r.wait_for("it is gone", lambda: daemon.status()["exports"] == [])
