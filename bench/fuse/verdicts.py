"""The FUSE targets: ratios to the best of the others, the floor of each transport, and what more queues may cost."""
import os
import statistics

from fuse.contestants import DEV_1, DEV_2, DEV_4, FREE, PINNED
from report import MET, MISSED, UNKNOWN, rate

# What programs that do nothing else reached on null, on a machine of the class that vshunt is built on (2 vCPUs, Linux
# 6.18): thousand IOPS of `aio:rr|rw:64:1` and `:4`. They say nothing on a machine with more CPUs.
FLOOR_CPUS = 2
FLOOR_SHARE = 0.9
FLOORS = {
    DEV_1: {"rr": (452, 297), "rw": (385, 269)},
    DEV_4: {"rr": (203, 436), "rw": (202, 352)},
    FREE: {"rr": (343, 467), "rw": (355, 364)},
    PINNED: {"rr": (221, 509), "rw": (191, 453)},
}
# Reads of 128k, GB/s, the best that each reached with any number of jobs.
FLOORS_LARGE = {DEV_1: 9.0, DEV_2: 13.2, PINNED: 4.9}


def median(cells, job, name, key="iops"):
    cell = cells.get((str(job), name))
    return cell.median(key) if cell else None


def best(cells, job, names):
    """-> (name, IOPS) of the fastest, or (None, None)."""
    measured = [(v, n) for n in names if (v := median(cells, job, n))]
    return max(measured)[::-1] if measured else (None, None)


def shown(job):
    """How IOPS of this job are written: thousands, or GB/s for large blocks."""
    size = job.block_bytes
    return rate if size <= 4096 else lambda iops: f"{iops * size / 1e9:.2f}GB/s"


def ratio(report, case, cells, job, ours, others, bound):
    """The best of `ours` against the best of `others`, at least `bound` times."""
    us, got = best(cells, job, ours)
    them, ref = best(cells, job, others)
    mine = ours[0] if len(ours) == 1 else "the best of vshunt"
    sentence = f"{job}: {mine} at least {bound:g} x the best of {', '.join(others)}"
    if any(hung := [n for n in ours if (c := cells.get((str(job), n))) and c.hung()]):
        report.judge(case, MISSED, f"{sentence}: hung: {', '.join(hung)}")
    elif not got or not ref:
        report.judge(case, UNKNOWN, sentence)
    else:
        show = shown(job)
        report.judge(case, MET if got >= bound * ref else MISSED,
                     f"{sentence}: x{got / ref:.2f} ({us} {show(got)} to {them} {show(ref)})")


def _floor(report, case, sentence, got, floor, show):
    if got is None or os.cpu_count() != FLOOR_CPUS:
        why = "" if got is None else f": {show(got)}; the floor was measured on {FLOOR_CPUS} CPUs"
        report.judge(case, UNKNOWN, sentence + why)
    else:
        report.judge(case, MET if got >= FLOOR_SHARE * floor else MISSED, f"{sentence}: x{got / floor:.2f} ({show(got)})")


def floors(report, case, cells, jobs):
    """Of 4k requests at depth 64, each transport and layout against what a bare server of its kind reached."""
    for job in jobs:
        if job.engine != "aio" or job.depth != 64 or job.bs != "4k" or job.jobs not in (1, 4):
            continue
        for name, floor in FLOORS.items():
            if job.pattern in floor:
                at = 1e3 * floor[job.pattern][job.jobs == 4]
                _floor(report, case, f"{job}: {name} at least {FLOOR_SHARE:g} of the floor, {rate(at)}",
                       median(cells, job, name), at, rate)


def floors_large(report, case, cells, jobs):
    reads = [j for j in jobs if j.pattern == "sr" and j.block_bytes > 4096]
    for name, floor in FLOORS_LARGE.items():
        measured = [v * j.block_bytes / 1e9 for j in reads if (v := median(cells, j, name))]
        _floor(report, case, f"128k reads: {name}, its best job, at least {FLOOR_SHARE:g} of the floor, {floor} GB/s",
               max(measured, default=None), floor, lambda v: f"{v:.2f}GB/s")


def paired(cells, job, of, base):
    """The median of the ratios within each repetition: what was measured side by side is compared side by side."""
    runs = [cells[str(job), n].runs if (str(job), n) in cells else [] for n in (of, base)]
    ratios = [a["iops"] / b["iops"] for a, b in zip(*runs) if isinstance(a, dict) and isinstance(b, dict) and b["iops"]]
    return statistics.median(ratios) if ratios else None


def loss(report, case, cells, job, of, base, loss_max):
    """`of`, which has more queues, against `base`: may lose less than `loss_max`."""
    got = paired(cells, job, of, base)
    sentence = f"{job}: {of} loses less than {loss_max:.0%} against {base}"
    verdict = UNKNOWN if got is None else MET if got > 1 - loss_max else MISSED
    report.judge(case, verdict, sentence + ("" if got is None else f": {got - 1:+.1%} (median of the repetitions' ratios)"))
