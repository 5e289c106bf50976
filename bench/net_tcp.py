"""TCP of a real guest with all offloads: its network device by vshunt on a tap, and by QEMU's own tap without vhost.

Two guests under TCG, of the same kernel and initramfs, one by each. Both are there, and one at a time is loaded, so that the
two are compared within seconds on a machine whose speed changes within minutes. In a network namespace, as root. Guests are
those of `tests/net`.

A job is `out|in:streams:queue pairs`. CPU time is that of QEMU and vshunt together. Most of it is the guest's
emulation; so what is not of the vCPUs' threads stands beside it. What the guest counts itself does not depend on the speed of
the machine: interrupts of its NIC, kicks, and the bytes of a frame.
"""
import contextlib
import os
import re
import statistics
import subprocess
import sys

from net import Missing, namespace, verdict
from server import TICK_HZ, StartError, child_setup

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "lib"))
import rig as r  # noqa: E402
import vm  # noqa: E402

CASE = "net-guest"
OURS, QEMU = "vshunt", "QEMU's tap"
PAIRS = (1, 2)
LOADS = [(way, streams) for way in ("out", "in") for streams in (1, 4)]
VCPUS = 2
# Beside the load's own time: a guest under TCG on a machine that does something else, too.
GRACE_S = 60
# Rounds that fail; then no more is tried.
FAILURES_MAX = 2
# Of the tap and the host's address on it.
PLACES = {OURS: ("vs0", "10.9.0"), QEMU: ("vs1", "10.9.1")}
MAC = "52:54:00:12:34:56"

JOB = """
ip link set lo up
ip addr add {net}.2/24 dev eth0
ip link set eth0 up
[ {pairs} = 1 ] || ethtool -L eth0 combined {pairs}
say up $(ls /sys/class/net/eth0/queues | wc -w) $(ethtool -k eth0 | grep -cE '^(tx-checksumming|tcp-segmentation-offload|rx-checksumming): on')
counts() {{
    awk '/virtio/ {{ for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) n += $i }} END {{ print n + 0 }}' /proc/interrupts
    ethtool -S eth0 | awk '/_kicks:/ {{ n += $2 }} END {{ print n + 0 }}'
    (cd /sys/class/net/eth0/statistics && cat tx_packets tx_bytes rx_packets rx_bytes)
}}
exec 3</dev/ttyS1
while read -r number streams seconds flag <&3 && [ "$number" != quit ]; do
    before=$(counts)
    iperf3 -c {net}.1 -P $streams -t $seconds $flag -f m >/tmp/iperf 2>&1
    code=$?
    say counts-$number $before $(counts)
    say result-$number $code $(grep -E 'receiver|error' /tmp/iperf | tail -n 1)
done
"""
# What `counts` prints.
COUNTS = ("interrupts", "kicks", "out_frames", "out_bytes", "in_frames", "in_bytes")


def ip(inside, line):
    done = subprocess.run([*inside, "ip", *line.split()], capture_output=True, text=True)
    if done.returncode:
        raise r.Failed(f"ip {line}: {done.stderr.strip()}")


@contextlib.contextmanager
def taps(inside, pairs):
    """The same kind of tap for both, each with an address of the host's."""
    kind = "multi_queue " if pairs > 1 else ""
    try:
        for name, net in PLACES.values():
            ip(inside, f"tuntap add dev {name} mode tap {kind}vnet_hdr")
            ip(inside, f"addr add {net}.1/24 dev {name}")
            ip(inside, f"link set {name} up")
        yield
    finally:
        for name, _ in PLACES.values():
            subprocess.run([*inside, "ip", "link", "del", name], capture_output=True)


class Side:
    """A guest, and the server of its NIC."""

    def __init__(self, b, stack, rig, inside, name, pairs):
        ifname, net = PLACES[name]
        self.server, tap, socket = None, ifname, None
        if name == OURS:
            argv = [b.tools.vshunt, "serve", "--net", f"name=n0,type=tap,ifname={ifname},queues={pairs}", "--export",
                    f"type=vhost-user-net,name=e0,net=n0,socket={{sock}},queues={pairs},workers=per-queue,engine=user",
                    "--control", "{sock}.control"]
            self.server = stack.enter_context(b.server(name, [*inside, *argv]))
            tap, socket = None, self.server.sock
        self.guest = vm.Guest(rig, socket, JOB.format(net=net, pairs=pairs), queues=pairs, vcpus=VCPUS, net=MAC, tap=tap,
                              inside=inside, name=f"guest-{ifname}-{rig.booted}", preexec_fn=child_setup())
        stack.callback(self.guest.child.kill)
        self.name, self.runs = name, 0

    def ready(self, pairs):
        said = self.guest.expect("up")
        r.require(said == f"{2 * pairs} 3", f"{self.name}: queues and offloads of the guest are {said}")

    def cpu(self):
        """-> seconds of all its processes, and of those beside the vCPUs' threads."""
        pids = [self.guest.child.pid] + ([self.server.pid] if self.server else [])
        total = sum(ticks(f"/proc/{pid}/stat")[1] for pid in pids)
        tasks = f"/proc/{pids[0]}/task"
        threads = [ticks(f"{tasks}/{t}/stat") for t in r.thread_ids(pids[0])]
        return total / TICK_HZ, (total - sum(n for name, n in threads if name.startswith("CPU "))) / TICK_HZ

    def load(self, way, streams, seconds):
        """One run of iperf3. -> {'gbit', 'cpu', 'cpu_host', …}: CPU in seconds a gigabyte; `count` has the rest."""
        self.runs += 1
        before = self.cpu()
        self.guest.tell(f"{self.runs} {streams} {seconds} {'-R' if way == 'in' else ''}")
        said = self.guest.expect(f"result-{self.runs}", 2 * seconds + GRACE_S)
        after = self.cpu()
        if self.server and (died := self.server.died()):
            raise r.Failed(died)
        found = re.match(r"0 \[.*\] +([\d.]+)-([\d.]+) +sec .* ([\d.]+) Mbits/sec", said)
        r.require(found and float(found[3]) > 0, f"{self.name}: iperf3 says {said}")
        gigabytes = float(found[3]) * (float(found[2]) - float(found[1])) / 8e3
        total, host = ((x - y) / gigabytes for x, y in zip(after, before))
        return {"gbit": float(found[3]) / 1e3, "cpu": total, "cpu_host": host} | count(self.guest.expect(f"counts-{self.runs}"), way)

    def end(self):
        self.guest.tell("quit")
        self.guest.end()


def count(said, way):
    """What the guest counted before and after a load. -> per megabyte of the load's frames; kilobytes of a frame."""
    words = [int(word) for word in said.split()]
    r.require(len(words) == 2 * len(COUNTS), f"the guest counts {said}")
    moved = {name: after - before for name, before, after in zip(COUNTS, words, words[len(COUNTS):])}
    megabytes = moved[f"{way}_bytes"] / 1e6
    r.require(megabytes > 0, f"the guest counts {said}")
    return {"interrupts": moved["interrupts"] / megabytes, "kicks": moved["kicks"] / megabytes,
            "frame_kb": megabytes * 1e3 / moved[f"{way}_frames"]}


def ticks(stat):
    """A process's or a thread's name and CPU time."""
    with open(stat) as f:
        name, rest = f.read().split("(", 1)[1].rsplit(")", 1)
    a = rest.split()
    return name, int(a[11]) + int(a[12])


def round_of(b, rig, inside, pairs, rep, runs):
    """Two fresh guests, all loads on both, by turns; only what both did is kept."""
    rig.booted += 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(taps(inside, pairs))
        server = r.Child(rig, f"iperf-{rig.booted}", [*inside, r.tool("iperf3", "iperf3"), "-s"], preexec_fn=child_setup())
        stack.callback(server.kill)
        sides = [Side(b, stack, rig, inside, name, pairs) for name in (OURS, QEMU)]
        for side in sides:
            side.ready(pairs)
        for i, (way, streams) in enumerate(LOADS):
            job, both = f"{way}:{streams}:{pairs}", {}
            for side in sides if (rep + i) % 2 == 0 else sides[::-1]:
                b.report.progress(f"{CASE}: repetition {rep + 1} of {b.o.reps}, {job}, {side.name}")
                both[side.name] = side.load(way, streams, b.o.time)
            for name, run in both.items():
                runs.setdefault((job, name), []).append(run)
        for side in sides:
            side.end()


def case(b):
    """vshunt against QEMU's own tap, throughput and CPU time."""
    b.report.heading(CASE, "iperf3 in a guest under TCG, 2 vCPUs, all offloads, to the host and back: its NIC by vshunt on a tap, and by QEMU's "
                           "own tap without vhost")
    rig = r.Rig("bench-guest")
    rig.booted = 0
    runs, failed = {}, 0
    try:
        r.tool("ethtool", "ethtool")
        with namespace() as inside:
            for rep, pairs in [(rep, pairs) for rep in range(b.o.reps) for pairs in PAIRS]:
                try:
                    round_of(b, rig, inside, pairs, rep, runs)
                except (r.Failed, StartError, OSError) as e:
                    b.report.note(f"{CASE}: {pairs} queue pairs, repetition {rep + 1}: {r.one_line(e)}")
                    failed += 1
                if failed == FAILURES_MAX:
                    break
    except (Missing, r.Skipped) as e:
        b.report.note(f"{CASE}: left out: {e}")
        return
    finally:
        rig.end()
    show(b, runs)


def compare(runs, job, key):
    """-> medians of both, and of the ratios within each repetition."""
    ours, peer = ([run[key] for run in runs.get((job, name), [])] for name in (OURS, QEMU))
    pairs = list(zip(ours, peer))
    if not pairs:
        return None, None, None
    return statistics.median(ours), statistics.median(peer), statistics.median(x / y for x, y in pairs)


def show(b, runs):
    rows, verdicts = [], []
    jobs = [f"{way}:{streams}:{pairs}" for pairs in PAIRS for way, streams in LOADS]
    for job in jobs:
        row = [job]
        for key, relation, good in (("gbit", "at least", lambda v: v >= 1), ("cpu", "less than", lambda v: v < 1), ("cpu_host", None, None)):
            ours, peer, ratio = compare(runs, job, key)
            row += [None] * 3 if ratio is None else [f"{ours:.2f}", f"{peer:.2f}", f"x{ratio:.2f}"]
            if relation:
                what = "throughput" if key == "gbit" else "CPU a byte"
                verdicts.append(verdict(ratio, good, f"{job}: {what} by {OURS} {relation} that by {QEMU}", lambda v: f"x{v:.2f}"))
        rows.append(row)
    columns = [f"{what} {OURS}" if name == OURS else name for what in ("Gbit/s", "CPU s/GB", "without vCPUs") for name in (OURS, QEMU, "ratio")]
    b.report.table(["way:streams:pairs", *columns], rows, "  ")
    b.report.line(f"  medians; ratios: the medians of those within each repetition; CPU: of QEMU and {OURS} together, of the guest's vCPUs, "
                  "too, and without")
    rows = []
    for job in jobs:
        row = [job]
        for key in ("interrupts", "kicks", "frame_kb"):
            ours, peer, ratio = compare(runs, job, key)
            row += [None] * 2 if ratio is None else [f"{ours:.1f}", f"{peer:.1f}"]
        rows.append(row)
    columns = [f"{what} {OURS}" if name == OURS else name for what in ("interrupts/MB", "kicks/MB", "kB/frame") for name in (OURS, QEMU)]
    b.report.table(["way:streams:pairs", *columns], rows, "  ")
    b.report.line("  medians of what the guest counts: interrupts of its NIC and kicks, of both directions; bytes of a frame in that of the load")
    b.report.line("  targets:")
    for found in verdicts:
        b.report.judge(CASE, *found)
    b.report.data["cases"][CASE] = {"loads": [{"job": j, "contestant": n, "runs": found} for (j, n), found in runs.items()]}
