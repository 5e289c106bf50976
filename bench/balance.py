"""The case `balance`: queues that follow load, beside the placements that stay.

Called by run.py. Eight queues of two exports are on two workers. In the first half of a run one export has much load and the
other little, then the other way round. What must never happen: the time in which queues still move is counted; see SETTLE_S.
"""
import json
import subprocess
import time

from cases import GRACE_S
from report import MET, MISSED, UNKNOWN, Cell, rate
from server import child_setup, end

AUTO = "balance=auto"
# Each export has workers of its own: one at first, and as many as pay.
SIZED = "workers=auto"
# The queues that are on the second worker, by placement. Those that follow load are all on the
# first one at the start.
PLACES = {"one worker": [], "in turn": ["vm0:1", "vm0:3", "vm1:1", "vm1:3"], "by export": ["vm1"], AUTO: [], SIZED: []}
QUEUES = 4
MUCH, LITTLE = ["--iodepth", "32"], ["--iodepth", "1"]
# Each half of a run, without the time that queues have to find their places.
HALF_S, HALF_QUICK_S, SETTLE_S = 8, 3, 3
RATE_MIN = 0.95


def case(b):
    """Prints a row for each placement, and the target."""
    half_s = HALF_QUICK_S if b.o.quick else HALF_S
    b.report.heading("balance", f"{2 * QUEUES} queues of 2 disks in memory on 2 workers, 16k random reads and writes; much load moves from one "
                                f"disk to the other; 2 x {half_s} s, each from {SETTLE_S} s on; medians of {b.o.reps}")
    cells = {name: Cell() for name in PLACES}
    for at in range(b.o.reps):
        for name in [*PLACES][at % len(PLACES):] + [*PLACES][:at % len(PLACES)]:
            b.report.progress(f"balance: {name}")
            try:
                cells[name].add(_run(b, name, half_s))
            except (OSError, ValueError, subprocess.SubprocessError, RuntimeError) as e:
                b.report.note(f"balance, {name}: {e}")
                cells[name].add(f"failed: {e}")
    fixed = {name: cell.median("iops") for name, cell in cells.items() if name not in (AUTO, SIZED)}
    best = max((iops for iops in fixed.values() if iops), default=None)
    rows = [[name, cell.text(best), cell.median("moves")] for name, cell in cells.items()]
    b.report.table(["placement", "all IOPS, to the best that stays", "moves"], rows)
    b.report.data["cases"]["balance"] = {name: cell.runs for name, cell in cells.items()}
    found, sentence = cells[AUTO].median("iops"), f"IOPS of {AUTO} at least {RATE_MIN} x the best placement that stays"
    if not found or not best:
        b.report.judge("balance", UNKNOWN, sentence)
    else:
        verdict = MET if found >= RATE_MIN * best else MISSED
        b.report.judge("balance", verdict, f"{sentence}: x{found / best:.2f} ({rate(found)} to {rate(best)})")


def _run(b, name, half_s):
    """-> {'iops', 'moves'} of one run."""
    argv = [b.tools.vshunt, "serve", "--control", "{sock}.control"]
    argv += ["--worker", "name=second"] if name != SIZED else []
    keys = f",{SIZED}" if name == SIZED else ""
    for at in (0, 1):
        argv += ["--disk", f"name=d{at},format=ram,size=256M",
                 "--export", f"type=vhost-user-blk,name=vm{at},disk=d{at},socket={{sock}}{at or ''},queues={QUEUES}{keys}"]
    if name == AUTO:
        argv += ["--balance", "auto"]
    with b.server(name, argv) as server:
        for queues in PLACES[name]:
            _cli(b, server, "attach", queues, "second")
        requests = sum(_half(b, server, busy, half_s) for busy in (0, 1))
        moves = sum((e.get("balancing") or {}).get("moves", 0) for e in _status(b, server)["exports"])
    return {"iops": requests / (2 * half_s), "moves": moves}


def _half(b, server, busy, half_s):
    """Much load on the export `busy` and little on the other one. -> requests of both in `half_s`."""
    loads = []
    try:
        for at in (0, 1):
            argv = [b.tools.bench, "blk", "--socket", f"{server.sock}{at or ''}", "--rw", "randrw", "--bs", "16k", "--queues", str(QUEUES),
                    *(MUCH if at == busy else LITTLE), "--runtime", f"{half_s + SETTLE_S + GRACE_S}s", "--quiet"]
            loads.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                          preexec_fn=child_setup(b.client_cpus)))
        time.sleep(SETTLE_S)
        before, since = _requests(b, server), time.monotonic()
        time.sleep(half_s)
        done, seconds = _requests(b, server) - before, time.monotonic() - since
        if any(load.poll() is not None for load in loads):
            raise RuntimeError(server.died() or "a load has ended")
        return done * half_s / seconds
    finally:
        for load in loads:
            end(load)


def _requests(b, server):
    return sum(q["requests"] for q in _status(b, server)["queues"])


def _status(b, server):
    return json.loads(_cli(b, server, "status", "--json"))


def _cli(b, server, *arguments):
    done = subprocess.run([b.tools.vshunt, "-c", server.control, *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout
