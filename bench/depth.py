"""The case `depth`: IOPS of a disk without storage by requests in flight, and the targets of the curve.

Called by run.py. A target is one line, with the rows that miss it. What must never happen: a fall of the curve that the
repetitions do not show is called a fall; see `noise`.
"""
import spdk
from cases import EACH, NULL_BYTES, ONE, PEER, Contestant, daemon, spdk_disks, vshunt
from client import Job
from report import MET, MISSED, SPREAD_MARKED, UNKNOWN, rate

DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128)
JOBS = [*(f"rr:{depth}:1" for depth in DEPTHS), "rr:32:4", "rr:128:4"]
DAEMON_MIN, EACH_MIN = 1, 0.9
CPU_US_MAX, CPU_FROM_DEPTH = 0.35, 8
P99_MAX = 1.5
# A fall below this is noise with any repetitions, and one above SPREAD_MARKED is a fall.
NOISE_MIN = 0.05


def case(b):
    """Prints a row for each job, and the targets."""
    title = "no storage behind it, 4k random reads, by requests in flight"
    b.report.heading("depth", f"{title}; the median of {b.o.reps_depth} times {b.o.time_depth} s")
    disk = f"format=null,size={NULL_BYTES}"
    takers = b.with_peer(
        *spdk_disks(b, null=None),
        Contestant(PEER, lambda q: daemon(b.tools, f"driver=null-co,size={NULL_BYTES},read-zeroes=off", q)),
        Contestant(ONE, lambda q: vshunt(b.tools, disk, q, "1")),
        Contestant(EACH, lambda q: vshunt(b.tools, disk, q, "per-queue"), many=True))
    jobs = [Job.parse(text, b.o.awake) for text in JOBS if not b.o.jobs or text in b.o.jobs]
    if not jobs:
        return
    names = [c.name for c in takers]
    base = next((n for n in (spdk.NAME, PEER) if n in names), ONE)
    cells = b.loads("depth", jobs, takers, base, [], reps=b.o.reps_depth, client=b.client_of(b.o.time_depth))
    for verdict, sentence in verdicts(cells, jobs):
        b.report.judge("depth", verdict, sentence)


def verdicts(cells, jobs):
    """-> (verdict, sentence) of each target. `cells`: (job's text, contestant's name) -> Cell."""
    first = {str(job) for job in jobs if job.depth == 1}
    deep = [job for job in jobs if job.depth >= CPU_FROM_DEPTH]
    many = [job for job in jobs if job.queues > 1]
    spdk_min = {str(job): spdk.FIRST_MIN if str(job) in first else spdk.MIN for job in jobs}
    return [
        _ratios(cells, jobs, f"IOPS of {ONE} at least {spdk.MIN} x {spdk.NAME} (depth 1: {spdk.FIRST_MIN})", ONE, spdk.NAME, spdk_min),
        _ratios(cells, jobs, f"IOPS of {ONE} at least the {PEER}'s", ONE, PEER, dict.fromkeys(map(str, jobs), DAEMON_MIN)),
        _ratios(cells, many, f"IOPS of {EACH} at least {EACH_MIN} x one worker", EACH, ONE, dict.fromkeys(map(str, many), EACH_MIN)),
        _rises(cells, jobs, ONE),
        _rises(cells, many, EACH),
        _cpu(cells, deep, ONE),
        _cpu(cells, [job for job in deep if job.queues > 1], EACH),
        _p99(cells, jobs),
    ]


def _median(cells, job, name, key):
    cell = cells.get((str(job), name))
    return cell.median(key) if cell else None


def _verdict(sentence, good, short, unknown):
    """`good` rows keep the target, `short` says of each row that does not how far it is, `unknown` rows have no figure."""
    total = good + len(short) + unknown
    if not good + len(short):
        return UNKNOWN, sentence
    parts = [f"{sentence}: {good} of {total}"]
    if short:
        parts.append("short at " + ", ".join(short))
    if unknown:
        parts.append(f"{unknown} not measured")
    return (MISSED if short else UNKNOWN if unknown else MET), "; ".join(parts)


def _ratios(cells, jobs, sentence, of, base, bounds):
    good, short, unknown = 0, [], 0
    for job in jobs:
        got, ref = _median(cells, job, of, "iops"), _median(cells, job, base, "iops")
        if not ref:
            unknown += 1
        elif got is None:
            short.append(f"{job} failed")
        elif got / ref >= bounds[str(job)]:
            good += 1
        else:
            short.append(f"{job} x{got / ref:.2f}")
    return _verdict(sentence, good, short, unknown)


def noise(cell):
    """Half the span of the repetitions' IOPS, as a share of their median: at least NOISE_MIN, at most SPREAD_MARKED."""
    values = [run["iops"] for run in cell.measured()]
    return min(max((max(values) - min(values)) / 2 / cell.median("iops"), NOISE_MIN), SPREAD_MARKED)


def _rises(cells, jobs, name):
    """Whether more requests in flight are never slower. A fall is one from the best row of fewer requests and as many
    queues that is larger than the noise of both rows."""
    good, short, unknown = 0, [], 0
    best = {}
    for job in jobs:
        cell = cells.get((str(job), name))
        if not cell or cell.median("iops") is None:
            unknown += 1
            continue
        iops, before = cell.median("iops"), best.get(job.queues)
        if before:
            allowed = max(noise(cell), noise(before[1]))
            if iops < before[1].median("iops") * (1 - allowed):
                short.append(f"{job} {rate(iops)} after {rate(before[1].median('iops'))} at {before[0]}")
            else:
                good += 1
        if not before or iops > before[1].median("iops"):
            best[job.queues] = job, cell
    return _verdict(f"IOPS of {name} do not fall with the depth (beyond the noise)", good, short, unknown)


def _cpu(cells, jobs, name):
    good, short, unknown = 0, [], 0
    for job in jobs:
        us = _median(cells, job, name, "cpu_us")
        if us is None:
            unknown += 1
        elif us <= CPU_US_MAX:
            good += 1
        else:
            short.append(f"{job} {us:.3f}us")
    return _verdict(f"CPU an I/O of {name} at most {CPU_US_MAX}us from depth {CPU_FROM_DEPTH} on", good, short, unknown)


def _p99(cells, jobs):
    good, short, unknown = 0, [], 0
    for job in jobs:
        got, ref = _median(cells, job, ONE, "p99_us"), _median(cells, job, spdk.NAME, "p99_us")
        if not got or not ref:
            unknown += 1
        elif got <= ref * P99_MAX:
            good += 1
        else:
            short.append(f"{job} x{got / ref:.2f}")
    return _verdict(f"99th percentile of {ONE}'s latency at most {P99_MAX} x {spdk.NAME}", good, short, unknown)
