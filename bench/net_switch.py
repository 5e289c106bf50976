"""Two guests of one daemon: joined by vshunt's switch, and by a tap each on a bridge of the kernel.

One guest is a source, the other a sink (`vshunt-bench net`); what counts is what arrives. In a network namespace, as root.
"""
import contextlib
import json
import subprocess
import time

from client import ClientError, Hung
from net import FLOWS, Missing, guarded, namespace, verdict
from report import Cell
from server import child_setup, end

SWITCH, BRIDGE = "switch", "taps and bridge"
JOBS = [f"{size}:{pairs}" for size in (64, 1500) for pairs in (1, 2)]
GAIN_MIN = 2.0
# The sink is there before the source and after it.
AROUND_S = 2


def vshunt(tools, nets, of, pairs):
    """Exports `a` and `b` of the networks that `of` names; the socket of `a` is made last."""
    argv = [tools.vshunt, "serve"]
    for net in nets:
        argv += ["--net", net]
    for export, sock in (("b", "{sock}.b"), ("a", "{sock}")):
        argv += ["--export", f"type=vhost-user-net,name={export},net={of[export]},socket={sock},queues={pairs},workers=per-queue"]
    return [*argv, "--control", "{sock}.control"]


def argv_of(tools, name, pairs):
    if name == SWITCH:
        return vshunt(tools, ["name=s0,type=switch"], {"a": "s0", "b": "s0"}, pairs)
    nets = [f"name=n{i},type=tap,ifname=vs{i},queues={pairs}" for i in (0, 1)]
    return vshunt(tools, nets, {"a": "n0", "b": "n1"}, pairs)


@contextlib.contextmanager
def bridge(inside, wanted):
    """The taps joined, while they are there."""
    if not wanted:
        yield
        return
    lines = ["link add br0 type bridge", *(f"link set {name} master br0" for name in ("vs0", "vs1")),
             *(f"link set {name} up" for name in ("br0", "vs0", "vs1"))]
    try:
        for line in lines:
            done = subprocess.run([*inside, "ip", *line.split()], capture_output=True, text=True)
            if done.returncode:
                raise ClientError(f"ip {line}: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run([*inside, "ip", "link", "del", "br0"], capture_output=True)


def guest(b, inside, socket, mode, job, time_s, pid):
    size, pairs = job.split(":")
    more = ["--announce"] if mode == "sink" else []
    return [*inside, b.tools.bench, "net", "--socket", socket, "--mode", mode, "--size", size, "--queues", pairs, "--flows", str(FLOWS),
            "--batch", "32", "--runtime", f"{time_s}s", "--server-pid", str(pid), "--quiet", "--json", *more]


def load(b, inside, server, job):
    """-> {'iops', 'cpu_us', …}: frames a second that arrive, the server's CPU time for each."""
    sink = subprocess.Popen(guest(b, inside, f"{server.sock}.b", "sink", job, b.o.time + AROUND_S, server.pid),
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=child_setup(b.client.cpus))
    try:
        time.sleep(AROUND_S / 4)
        source = json.loads(b.client.bounded(guest(b, inside, server.sock, "source", job, b.o.time, server.pid), b.client.cpus,
                                             lambda _: None))
        try:
            out, err = sink.communicate(timeout=b.o.time + 10)
        except subprocess.TimeoutExpired:
            raise Hung from None
    finally:
        end(sink)
    if sink.returncode:
        raise ClientError(f"the sink ended with {sink.returncode}: {err[-300:].strip()}")
    arrived = json.loads(out)["received"]["frames"]
    if not arrived:
        raise ClientError("no frame came through")
    kept = {"iops": arrived / source["seconds"], "sent": source["sent"]["frames"], "arrived": arrived}
    cpu = source["server_cpu"]
    return kept if cpu is None else kept | {"cpu_us": cpu["seconds"] * 1e6 / arrived}


def run(b, case, inside, name, job):
    """-> a result, 'hung', or 'failed: why'."""

    def body(server):
        with bridge(inside, name == BRIDGE):
            return load(b, inside, server, job)

    return guarded(b, case, inside, name, argv_of(b.tools, name, int(job.split(":")[1])), job, body)


def case(b):
    """The switch against two taps and a bridge."""
    name = "net-switch"
    b.report.heading(name, "frames from one guest to another of the same daemon, by its switch and by two taps on a bridge; a worker a queue pair")
    cells = {}
    try:
        with namespace() as inside:
            for rep in range(b.o.reps):
                for job in JOBS:
                    for taker in (SWITCH, BRIDGE) if rep % 2 == 0 else (BRIDGE, SWITCH):
                        cell = cells.setdefault((job, taker), Cell())
                        if not cell.given_up():
                            b.report.progress(f"{name}: repetition {rep + 1} of {b.o.reps}, {job}, {taker}")
                            cell.add(run(b, name, inside, taker, job))
    except Missing as e:
        b.report.note(f"{name}: left out: {e}")
        return
    base = {job: cells[job, BRIDGE].median("iops") for job in JOBS}
    rows = [[job, cells[job, SWITCH].text(base[job]), cells[job, BRIDGE].text(None)] for job in JOBS]
    b.report.table(["bytes:pairs", SWITCH, BRIDGE], rows, "  ")
    b.report.line(f"  thousand frames/s that arrive, medians; xR: ratio to {BRIDGE}; us: the server's CPU time for each")
    b.report.line("  targets:")
    for job in JOBS:
        ours = cells[job, SWITCH].median("iops")
        gain = ours / base[job] if ours and base[job] else None
        sentence = f"{job}: frames a second by the switch at least {GAIN_MIN:g} x those by {BRIDGE}"
        b.report.judge(name, *verdict(gain, lambda v: v >= GAIN_MIN, sentence, lambda v: f"x{v:.2f}"))
    kept = [{"job": j, "contestant": n, "frames_per_s": c.median("iops"), "cpu_us": c.median("cpu_us"), "runs": c.runs}
            for (j, n), c in cells.items()]
    b.report.data["cases"][name] = {"loads": kept}
