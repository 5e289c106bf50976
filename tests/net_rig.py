"""What the parts of tests/net share: the namespace, daemons with a network, their counters."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import rig as r

MAC = "52:54:00:12:34:56"
MTU = 9000
# What parts of the rig use of other networks; where it is missing those say so themselves.
FETCHES = {"testpmd": "testpmd", "guest": "guest-image", "guests": "guest-image"}
CLONE_NEWNET, CLONE_NEWNS = 0x4000_0000, 0x0002_0000


def chosen(parts):
    """The parts to be run: those that the command line names, or all. `tests/net shapes kill`"""
    unknown = [a for a in sys.argv[1:] if a not in parts]
    r.require(not unknown, f"no part {unknown}: {' '.join(parts)}")
    return sys.argv[1:] or list(parts)


def net_guest():
    """Path of the example; `prepare` builds it."""
    return str(r.target_dir() / "debug/examples/net_guest")


def prepare(rig, parts):
    """Builds what is missing, which may need the machine's network, then leaves it for one of our own."""
    if os.geteuid() != 0:
        raise r.Skipped("network namespaces and taps need root")
    if not os.path.exists("/dev/net/tun"):
        raise r.Skipped("/dev/net/tun is missing: modprobe tun")
    # As `cargo test --workspace` builds it, which has been there before.
    argv = [os.environ.get("CARGO", "cargo"), "build", "--locked", "--workspace", "--example", "net_guest"]
    done = subprocess.run(argv, cwd=r.ROOT, capture_output=True, text=True, timeout=1800)
    r.require(done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}: {done.stderr[-1500:]}")
    # They are fetched where there is a network.
    for part, fetch in FETCHES.items():
        if part in parts:
            subprocess.run([r.ROOT / "scripts" / fetch], capture_output=True, timeout=900)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWNS) != 0:
        raise r.Skipped(f"no namespace of our own can be made: {os.strerror(ctypes.get_errno())}")
    # What is mounted from now on is ours alone; /sys/class/net shows the namespace that mounted it.
    r.run(["mount", "--make-rprivate", "/"])
    r.run(["mount", "-t", "sysfs", "sysfs", "/sys"])
    # The host's stack says nothing by itself.
    Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    ip("link", "set", "lo", "up")


def ip(*arguments):
    """`ip …`, in our namespace."""
    return r.run([r.tool("ip", "iproute2"), *arguments]).stdout


def statistic(which):
    """A number of the tap's, as the kernel counts."""
    with open(f"/sys/class/net/vs0/statistics/{which}") as f:
        return int(f.read())


def cpu_s(daemon):
    """CPU time of a daemon so far."""
    with open(f"/proc/{daemon.child.pid}/stat") as stat:
        words = stat.read().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def rests(daemon):
    """It does nothing while nothing is asked of it; a worker that spins has all of a second."""
    def second():
        before = cpu_s(daemon)
        time.sleep(1)
        return cpu_s(daemon) - before

    r.wait_for("a daemon that rests", lambda: second() < 0.3)


def joined(rig, name):
    """A daemon with a switch of two cards, c0 of one pair and c1 of two. -> it, their sockets"""
    sockets, exports = [rig.dir / f"{name}{k}.sock" for k in range(2)], []
    for k, socket in enumerate(sockets):
        exports += ["--export", f"type=vhost-user-net,name=c{k},net=s0,socket={socket},queues={k + 1}"]
    return r.Daemon(rig, "--net", "type=switch,name=s0", *exports, name=name), sockets


class Net(r.Daemon):
    """A daemon with one tap, vs0, and one export on it, c0."""

    def __init__(self, rig, name, pairs=2, workers="per-queue", net="", export="", mac=MAC, mtu=MTU):
        self.socket = rig.dir / f"{name}.sock"
        card = f"type=vhost-user-net,name=c0,net=n0,socket={self.socket},queues={pairs},workers={workers}"
        card += f",mac={mac},mtu={mtu}{export}"
        super().__init__(rig, "--net", f"type=tap,name=n0,ifname=vs0{net}", "--export", card, name=name)

    def queues(self):
        """Status of the queue pairs, by index."""
        return {q["index"]: q for q in self.status()["queues"] if "net" in q}

    def control_queue(self):
        """Status of the control queue, the last one."""
        return next(q for q in self.status()["queues"] if "net" not in q)

    def counters(self):
        """Network counters by queue."""
        return {index: q["net"] for index, q in self.queues().items()}

    def drops(self):
        """Frames that did not get through: by reason, all queues together; those that are not 0."""
        total = {}
        for counters in self.counters().values():
            for why, count in counters["drops"].items():
                total[why] = total.get(why, 0) + count
        return {why: count for why, count in total.items() if count}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Its tap is not there for the next one."""
        self.child.kill()

    def end(self):
        """Ends as asked, and leaves no interface."""
        code = self.child.stop()
        r.require(code == 0, f"vshunt ended with {code}: {self.child.tail()}")
        r.require(not os.path.exists("/sys/class/net/vs0"), "the tap is left behind")
