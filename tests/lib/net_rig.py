"""Daemons with a network, their counters, and the programs that play their guests. For tests in tests/net."""

import os
import re
import subprocess
import time

import net_frames as f
import net_peer as c
import rig as r

MAC = "52:54:00:12:34:56"
MTU = 9000


def net_guest():
    """Path of the example; `build_net_guest` builds it."""
    return str(r.target_dir() / "debug/examples/net_guest")


def build_net_guest():
    """Builds the example as `cargo test --workspace` does, which usually ran before."""
    argv = [os.environ.get("CARGO", "cargo"), "build", "--locked", "--workspace", "--example", "net_guest"]
    done = subprocess.run(argv, cwd=r.ROOT, capture_output=True, text=True, timeout=1800)
    r.require(done.returncode == 0, f"{' '.join(argv)} ended with {done.returncode}: {done.stderr[-1500:]}")


def testpmd():
    """How testpmd is started; `scripts/testpmd` fetches it."""
    done = subprocess.run([r.ROOT / "scripts/testpmd"], capture_output=True, text=True, timeout=900)
    if done.returncode == 3:
        raise r.Skipped(done.stderr.strip().splitlines()[-1])
    r.require(done.returncode == 0, f"scripts/testpmd ended with {done.returncode}: {done.stderr[-600:]}")
    return done.stdout.strip().splitlines()[-1]


def require_taps():
    if os.geteuid() != 0:
        raise r.Skipped("network namespaces and taps need root")
    if not os.path.exists("/dev/net/tun"):
        raise r.Skipped("/dev/net/tun is missing: modprobe tun")


def ip(*arguments):
    """`ip …`, in the namespace of the tests."""
    return r.run([r.tool("ip", "iproute2"), *arguments]).stdout


def statistic(which):
    """A statistic of the tap, as the kernel counts it."""
    with open(f"/sys/class/net/vs0/statistics/{which}") as file:
        return int(file.read())


def cpu_s(daemon):
    """CPU time of a daemon so far."""
    with open(f"/proc/{daemon.child.pid}/stat") as stat:
        words = stat.read().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def rests(daemon):
    """Waits until the daemon is idle. A worker that spins uses a whole second of CPU time in each second."""

    def second():
        before = cpu_s(daemon)
        time.sleep(1)
        return cpu_s(daemon) - before

    r.wait_for("a daemon that rests", lambda: second() < 0.3)


def asleep(daemon):
    """Waits until the workers of a daemon sleep. They do if they waited in the kernel all the time from one look to the next."""

    def look():
        found = {}
        for task, status in r.threads(daemon.child.pid, "status"):
            if status.startswith("Name:\tworker-"):
                found[task.name] = re.findall(r"^(?:State|\w+_ctxt_switches):\s+(\S+)", status, re.MULTILINE)
        return found

    def sleep():
        before = look()
        time.sleep(0.02)
        return before and before == look() and all(state == "S" for state, *_ in before.values())

    r.wait_for("the workers sleep", sleep)


def joined(rig, name):
    """A daemon with a switch of two NICs, c0 of one pair and c1 of two. -> it, their sockets"""
    sockets, exports = [rig.dir / f"{name}{k}.sock" for k in range(2)], []
    for k, socket in enumerate(sockets):
        exports += ["--export", f"type=vhost-user-net,name=c{k},net=s0,socket={socket},queues={k + 1}"]
    return r.Daemon(rig, "--net", "type=switch,name=s0", *exports, name=name), sockets


class Net(r.Daemon):
    """A daemon with one tap, vs0, and one export on it, c0."""

    def __init__(self, rig, name, pairs=2, workers="per-queue", net="", export="", mac=MAC, mtu=MTU):
        self.socket = rig.dir / f"{name}.sock"
        nic = f"type=vhost-user-net,name=c0,net=n0,socket={self.socket},queues={pairs},workers={workers}"
        nic += f",mac={mac},mtu={mtu}{export}"
        super().__init__(rig, "--net", f"type=tap,name=n0,ifname=vs0{net}", "--export", nic, name=name)

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


# Addresses of the two guests of a switch, and those of their exports: the first is that of the
# NICs.
A_MAC, B_MAC = f.GUEST_MAC, f.HOST_MAC
MACS = (MAC, "52:54:00:12:34:57")


class Two(r.Daemon):
    """A daemon with a switch of two ports, each with one queue pair."""

    def __init__(self, rig, name="switched", mtu=1500):
        self.sockets = [rig.dir / f"{name}{k}.sock" for k in range(2)]
        exports = []
        for k, socket in enumerate(self.sockets):
            exports += ["--export", f"type=vhost-user-net,name=c{k},net=s0,socket={socket},queues=1,mac={MACS[k]},mtu={mtu},mac-filter=off"]
        super().__init__(rig, "--net", "type=switch,name=s0", *exports, name=name)

    def nics(self, a=0, b=0, size=256):
        """Two NICs with these features and merged buffers; the second one with these rings."""
        return c.Nic(self.sockets[0], c.MRG_RXBUF | a), c.Nic(self.sockets[1], c.MRG_RXBUF | b, size=size)

    def drops(self, nic):
        """By reason, those that are not 0."""
        net = next(q["net"] for q in self.status()["queues"] if q["export"] == f"c{nic}")
        return {why: count for why, count in net["drops"].items() if count}

    def passes(self, a, b, number, length=600):
        """A frame from the one to the other."""
        if len(b.rings[0].chains) == 0:
            b.fill(4, 2048)
        a.transmit(f.frame(number, length, B_MAC, A_MAC))
        got = b.take()
        r.require(got is not None, f"frame {number} does not come")
        f.check(got[1], number, length, B_MAC, A_MAC)


class Up(r.Daemon):
    """A switch with an uplink, vs0, and a NIC of one pair: for the same tests as a NIC on a tap."""

    def __init__(self, rig, name="up", mtu=1500, more=()):
        self.socket = rig.dir / f"{name}.sock"
        super().__init__(
            rig,
            *("--net", "type=switch,name=s0", "--net", "type=tap,name=t0,ifname=vs0"),
            *("--export", f"type=uplink,name=u0,net=s0,tap=t0,queues=2,workers=per-queue,mtu={mtu}"),
            *("--export", f"type=vhost-user-net,name=c0,net=s0,socket={self.socket},queues=1,mac={MAC}"),
            *more,
            name=name,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()

    def drops(self):
        """Of the NIC, by reason; those that are not 0."""
        return drops(self, "c0")


def drops(daemon, export):
    """Frames of an export that were dropped: by reason, all queues together; those that are not 0."""
    total = {}
    for q in daemon.status()["queues"]:
        if q["export"] == export and "net" in q:
            for why, count in q["net"]["drops"].items():
                total[why] = total.get(why, 0) + count
    return {why: count for why, count in total.items() if count}
