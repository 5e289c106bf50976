"""Networks: what a tap costs by itself, and what vshunt's vhost-user-net adds to it, beside DPDK's net_vhost + net_tap
and cloud-hypervisor's vhost_user_net.

The guest is `vshunt-bench net` for all, which also plays the host's end of the tap (--peer): frames from the guest (`out`),
and to it (`in`). Everything runs in a network namespace that the case makes and removes; servers and loads are started in
it by `ip netns exec`, which becomes them. As root.

A job is `out|in:bytes:queue pairs`. Rates on few CPUs say how those were shared by server, guest and sender: what is
judged is the server's CPU time a frame.
"""
import contextlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from client import ClientError, Hung
from report import MET, MISSED, UNKNOWN, Cell, Target
from server import StartError

OURS, DPDK, CLOUD, PLAIN = "vshunt", "DPDK", "cloud-hypervisor", "plain loop"
JOBS = [f"{way}:{size}:{pairs}" for way in ("out", "in") for size in (64, 1500) for pairs in (1, 2)]
MODES = {"out": "source", "in": "sink"}
# What a read from a tap took when the project began, with a tenth more: nanoseconds.
READ_NS_MAX = 660
WRITE_GAIN_MIN = 1.7
# What vhost-user-net may add to the tap's own cost, microseconds a frame of 64 bytes.
ADDED_US_MAX = 0.2
FLOWS = 64
# The rows of `vshunt-bench tap` for writes into a tap with a steering program.
STEERED = "write, steered"
# Of the frames that a server took, the share that is to come out of its tap.
ARRIVED_MIN = 0.99


class Missing(Exception):
    """Why networks cannot be measured here."""


@dataclass(frozen=True)
class Taker:
    """The server of the NIC: its argv, its tap, further options for the guest's driver, and whether the server ends
    with its front end."""
    argv: list
    ifname: str
    guest: tuple = ()
    ends: bool = False


@contextlib.contextmanager
def namespace():
    """-> the beginning of an argv that runs a program in a network namespace of its own."""
    if os.geteuid():
        raise Missing("needs root")
    if not os.path.exists("/dev/net/tun"):
        raise Missing("no /dev/net/tun: modprobe tun")
    if not shutil.which("ip"):
        raise Missing("no ip: install iproute2")
    name = f"vsbench{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"no network namespace: {done.stderr.strip()}")
    try:
        yield ["ip", "netns", "exec", name]
    finally:
        subprocess.run(["ip", "netns", "del", name])


def vshunt(tools, pairs):
    argv = [tools.vshunt, "serve", "--net", f"name=n0,type=tap,ifname=vs0,queues={pairs}", "--export",
            f"type=vhost-user-net,name=e0,net=n0,socket={{sock}},queues={pairs},workers=per-queue,engine=user",
            "--control", "{sock}.control"]
    return Taker(argv, "vs0")


def dpdk(program, pairs):
    """Forwards between the two, a polling thread a pair; the first thread only waits."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    threads = ",".join(f"{t}@({cpus})" for t in range(pairs + 1))
    argv = [*program, f"--lcores={threads}", "--no-huge", "-m", "512", "--no-pci", f"--file-prefix=vsbench{os.getpid()}",
            f"--vdev=net_vhost0,iface={{sock}},queues={pairs}", "--vdev=net_tap0,iface=dt0", "--",
            "--forward-mode=io", "--auto-start", f"--nb-cores={pairs}", f"--rxq={pairs}", f"--txq={pairs}",
            "--total-num-mbufs=32768",
            # Without it the program waits for a key.
            "--stats-period=3600"]
    return Taker(argv, "dt0")


def cloud(program, pairs):
    """A thread a pair. It counts rings, and has a receive buffer for each frame: no VIRTIO_NET_F_MRG_RXBUF."""
    argv = [program, "--net-backend", f"tap=ch0,socket={{sock}},num_queues={2 * pairs},queue_size=256"]
    return Taker(argv, "ch0", ("--no-mrg",), ends=True)


def load(b, inside, server, job, taker):
    """One run of the guest. -> {'iops', 'cpu_us', ...}: frames a second, the server's CPU time a frame."""
    way, size, pairs = job.split(":")
    argv = [*inside, b.tools.bench, "net", "--socket", server.sock, "--mode", MODES[way], "--size", size, "--queues", pairs,
            "--flows", str(FLOWS), "--batch", "32", "--peer", taker.ifname, "--runtime", f"{b.o.time}s",
            "--server-pid", str(server.pid), "--quiet", "--json", *taker.guest]
    result = json.loads(b.client.bounded(argv, b.client.cpus, lambda _: None))
    moved = result["sent" if way == "out" else "received"]
    cpu = (result["server_cpu"] or {}).get("ns_per_frame")
    if not moved["frames"]:
        raise ClientError("no frame came through")
    # What is given back is not all delivered: a server that drops is cheap.
    arrived = result["peer"]["arrived"]
    if way == "out" and arrived is not None and arrived < ARRIVED_MIN * moved["frames"]:
        b.report.note(f"{job}: of the frames given to {taker.ifname}'s server only {arrived / moved['frames']:.1%} arrived")
    kept = {"iops": moved["frames_per_s"], "lost": result["check"]["lost"], "calls": result["calls_per_frame"],
            "kicks": result["kicks_per_frame"], "arrived": result["peer"]["arrived"], "offered": result["peer"]["sent"]}
    return kept if cpu is None else kept | {"cpu_us": cpu / 1e3}


def guarded(b, case, inside, name, argv, job, body, ends=False):
    """`body(server)` with that server, which may have ended well behind it (`ends`). -> a result, 'hung', or 'failed: why'."""
    try:
        with b.server(name, [*inside, *argv]) as server:
            result = body(server)
            died = server.died()
            if died and not (ends and server.process.returncode == 0):
                raise ClientError(died)
        return result
    except Hung:
        return "hung"
    except (ClientError, StartError, OSError, ValueError) as e:
        b.report.note(f"{case} {job}: {name}: {e}")
        return f"failed: {e}"


def plain(b, queues, mode, size, time_s):
    """`vshunt-bench tap`: the loop that only reads or writes. -> its JSON"""
    argv = [b.tools.bench, "tap", "--queues", queues, "--mode", mode, "--size", str(size), "--flows", str(FLOWS),
            "--runtime", f"{time_s}s", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60 + 20 * time_s)
    if done.returncode:
        raise ClientError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def tap(b):
    """The tap alone, beside the table that tuntap's several queues came with."""
    case = "net-tap"
    b.report.heading(case, "a tap alone: frames of 64 bytes out of its queues and into them, by threads that do nothing else")
    cells = {}
    try:
        with namespace():
            pass
        for rep in range(b.o.reps):
            b.report.progress(f"{case}: repetition {rep + 1} of {b.o.reps}")
            found = plain(b, "1,2,3,4", "both", 64, b.o.time)
            for row in found["rows"]:
                for f in row["figures"]:
                    cell = cells.setdefault((row["what"], f["queues"]), Cell())
                    cell.add({"iops": f["kpps"] * 1e3} | ({} if f["cpu_ns"] is None else {"cpu_us": f["cpu_ns"] / 1e3}))
    except (Missing, ClientError, subprocess.TimeoutExpired) as e:
        b.report.note(f"{case}: left out: {e}")
        return
    rows = []
    for queues in (1, 2, 3, 4):
        seed = next(s for s in found["seed"] if s["queues"] == queues)
        texts = [cells[what, queues].text(None if queues == 1 else cells[what, 1].median("iops")) if (what, queues) in cells else None
                 for what in ("read", "write", STEERED)]
        rows.append([str(queues), *texts, f"{seed['kpps']}k" + (f" x{1 + seed['gain_percent'] / 100:.2f}" if queues > 1 else "")])
    b.report.table(["queues", "read", "write", STEERED, "seed, read"], rows, "  ")
    b.report.line("  thousand frames/s, medians; xR: ratio to one queue; us: CPU time a frame of the threads of the queues; steered: with a "
                  "steering program, as with steering=rss. Without one, the kernel computes a hash for each written frame if there are "
                  "several queues")
    cpus = len(os.sched_getaffinity(0))
    if cpus < 5:
        b.report.line(f"  {cpus} CPUs: a sender and readers share them, so that more readers receive less; CPU time counts")
    read_us = cells["read", 1].median("cpu_us")
    b.report.line("  targets:")
    sentence = f"CPU a frame of the plain read loop at most {READ_NS_MAX} ns"
    b.report.judge(case, *verdict(read_us, lambda v: v * 1e3 <= READ_NS_MAX, sentence, lambda v: f"{v * 1e3:.0f} ns"))
    for what, how in (("write", ""), (STEERED, ", with a steering program")):
        one, two = (cells.get((what, queues), Cell()) for queues in (1, 2))
        gain = ratio(two.median("iops"), one.median("iops")) if cpus >= 2 else None
        # What it would be if each queue had a CPU of its own all the time.
        by_cpu = ratio(one.median("cpu_us"), two.median("cpu_us"))
        sentence = f"writes into 2 queues at least {WRITE_GAIN_MIN} x those into one{how}"
        shown = "" if by_cpu is None else f" (by CPU time a frame: x{2 * by_cpu:.2f})"
        b.report.judge(case, *verdict(gain, lambda v: v >= WRITE_GAIN_MIN, sentence, lambda v, more=shown: f"x{v:.2f}{more}"))
    b.report.data["cases"][case] = {f"{what}:{queues}": cell.runs for (what, queues), cell in cells.items()}


def ratio(over, under):
    return over / under if over and under else None


def verdict(value, good, sentence, show):
    if value is None:
        return UNKNOWN, sentence
    return MET if good(value) else MISSED, f"{sentence}: {show(value)}"


def user(b):
    """vshunt's own engine of vhost-user-net beside DPDK's, and beside the plain loop on a tap."""
    case = "net-user"
    b.report.heading(case, "a guest's network device on a tap, by vshunt (a worker a queue pair), by DPDK's net_vhost + net_tap, which polls, "
                           "and by cloud-hypervisor's vhost_user_net")
    takers = {OURS: lambda pairs: vshunt(b.tools, pairs)}
    if program := b.tools.testpmd:
        takers[DPDK] = lambda pairs: dpdk(program, pairs)
    else:
        b.report.note("net-user: no dpdk-testpmd: its column is left out; apt-get install dpdk-dev librte-meta-net")
    if cloud_program := b.tools.cloud_net:
        takers[CLOUD] = lambda pairs: cloud(cloud_program, pairs)
    else:
        b.report.note("net-user: no vhost_user_net of cloud-hypervisor: its column is left out; build it from its sources, and set "
                      "VSHUNT_CH_NET to the program")
    cells = {}
    try:
        with namespace() as inside:
            for rep in range(b.o.reps):
                for job in JOBS:
                    names = list(takers)
                    for name in names[rep % len(names):] + names[:rep % len(names)]:
                        cell = cells.setdefault((job, name), Cell())
                        if cell.given_up():
                            continue
                        b.report.progress(f"{case}: repetition {rep + 1} of {b.o.reps}, {job}, {name}")
                        taker = takers[name](int(job.split(":")[2]))
                        cell.add(guarded(b, case, inside, name, taker.argv, job,
                                         lambda server: load(b, inside, server, job, taker), taker.ends))
                    way, size, pairs = job.split(":")
                    if pairs == "1":
                        mode = "write" if way == "out" else "read"
                        figure = plain(b, "1", mode, size, b.o.time)["rows"][0]["figures"][0]
                        one = {"iops": figure["kpps"] * 1e3}
                        if figure["cpu_ns"] is not None:
                            one["cpu_us"] = figure["cpu_ns"] / 1e3
                        cells.setdefault((job, PLAIN), Cell()).add(one)
    except (Missing, ClientError, subprocess.TimeoutExpired) as e:
        b.report.note(f"{case}: left out: {e}")
        return
    table(b, case, cells, [*takers, PLAIN])
    judge(b, case, [n for n in (DPDK, CLOUD) if n in takers], cells)


def table(b, case, cells, names):
    rows = []
    for job in JOBS:
        base = cells[job, DPDK].median("iops") if (job, DPDK) in cells else None
        texts = [cells[job, n].text(base if n == OURS else None) if (job, n) in cells else None for n in names]
        rows.append([job, *texts])
    b.report.table(["way:bytes:pairs", *names], rows, "  ")
    b.report.line(f"  thousand frames/s, medians; xR: ratio to {DPDK}; us: the server's CPU time a frame ({PLAIN}: that of a thread "
                  "that only writes into the tap's queue, or reads)")
    kept = [{"job": j, "contestant": n, "frames_per_s": c.median("iops"), "cpu_us": c.median("cpu_us"), "runs": c.runs}
            for (j, n), c in cells.items()]
    b.report.data["cases"][case] = {"loads": kept}


def judge(b, case, peers, cells):
    b.report.line("  targets:")
    for peer in peers:
        for job in JOBS:
            found, sentence = Target(job, OURS, peer, "cpu", 1, strict=True).judge(cells)
            b.report.judge(case, found, sentence.replace("CPU an I/O", "CPU a frame"))
    for way in MODES:
        job = f"{way}:64:1"
        ours, alone = (cells[job, n].median("cpu_us") if (job, n) in cells else None for n in (OURS, PLAIN))
        added = None if None in (ours, alone) else ours - alone
        sentence = f"{job}: {OURS} adds at most {ADDED_US_MAX * 1e3:.0f} ns of CPU a frame to the tap's own"
        b.report.judge(case, *verdict(added, lambda v: v <= ADDED_US_MAX, sentence,
                                      lambda v: f"{v * 1e3:+.0f} ns ({ours * 1e3:.0f} to {alone * 1e3:.0f})"))
