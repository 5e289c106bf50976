"""The FUSE targets: ratios to the best of the others, the floor of each transport, and what more queues may cost."""
import statistics

from report import MET, MISSED, UNKNOWN, rate

from fuse.contestants import DEV_1, DEV_2, DEV_4, FLOOR_OF, FREE, PINNED

FLOOR_SHARE = 0.9
# Layouts that are judged by reads of 128k.
LARGE = (DEV_1, DEV_2, DEV_4, PINNED)
# What programs that do nothing else reached on null on another day, on a machine of the class that
# vshunt is built on (2 vCPUs, Linux 6.18): thousand IOPS of `aio:rr|rw:64:1` and `:4`. Printed
# beside the floor of the run; they decide nothing.
FLOOR_CPUS = 2
FLOORS_OLDER = {
    DEV_1: {"rr": (452, 297), "rw": (385, 269)},
    DEV_4: {"rr": (203, 436), "rw": (202, 352)},
    FREE: {"rr": (343, 467), "rw": (355, 364)},
    PINNED: {"rr": (221, 509), "rw": (191, 453)},
}
# Reads of 128k, GB/s, the best that each reached with any number of jobs.
FLOORS_LARGE_OLDER = {DEV_1: 9.0, DEV_2: 13.2, PINNED: 4.9}


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


def has_floor(job):
    """Whether a job of 4k requests is one that floors are for."""
    return job.engine == "aio" and job.pattern in ("rr", "rw") and job.depth == 64 and job.bs == "4k" and job.jobs in (1, 4)


def has_floor_large(job):
    return job.pattern == "sr" and job.block_bytes > 4096


def paired(cells, job, of, base):
    """The median of the ratios within each repetition: what was measured side by side is compared side by side."""
    runs = [cells[str(job), n].runs if (str(job), n) in cells else [] for n in (of, base)]
    ratios = [a["iops"] / b["iops"] for a, b in zip(*runs) if isinstance(a, dict) and isinstance(b, dict) and b["iops"]]
    return statistics.median(ratios) if ratios else None


def _floor(report, case, what, ratio, figures, older):
    """A layout against the floor of this run. `figures`: what both reached, as text; `older`: the same, or None."""
    sentence = f"{what} at least {FLOOR_SHARE:g} of its floor"
    beside = f" (older measurement, {FLOOR_CPUS} CPUs: {older})" if older else ""
    if ratio is None:
        report.judge(case, UNKNOWN, sentence + beside)
    else:
        report.judge(case, MET if ratio >= FLOOR_SHARE else MISSED, f"{sentence}: x{ratio:.2f} ({' to '.join(figures)}){beside}")


def floors(report, case, cells, jobs):
    """Of 4k requests at depth 64, each layout against what a bare server of its kind reached: the median of the ratios
    within each repetition."""
    for job in filter(has_floor, jobs):
        for name, figures in FLOORS_OLDER.items():
            pair = [cells.get((str(job), n)) for n in (name, FLOOR_OF[name])]
            ratio = paired(cells, job, name, FLOOR_OF[name])
            shares = [rate(c.median("iops")) + ("~" if c.unsteady() else "") for c in pair] if ratio else []
            _floor(report, case, f"{job}: {name}", ratio, shares, rate(1e3 * figures[job.pattern][job.jobs == 4]))


def floors_large(report, case, cells, jobs):
    """Of reads of 128k, the best job of each; which one that is depends on the number of threads."""
    def most(name):
        return max((v * j.block_bytes for j in filter(has_floor_large, jobs) if (v := median(cells, j, name))), default=None)

    def show(bytes_per_s):
        return f"{bytes_per_s / 1e9:.2f}GB/s"

    for name in LARGE:
        got, floor, older = most(name), most(FLOOR_OF[name]), FLOORS_LARGE_OLDER.get(name)
        ratio = got / floor if got and floor else None
        _floor(report, case, f"128k reads: {name}, its best job,", ratio, [show(v) for v in (got, floor) if v],
               older and show(older * 1e9))


def loss(report, case, cells, job, of, base, loss_max):
    """`of`, which has more queues, against `base`: may lose less than `loss_max`."""
    got = paired(cells, job, of, base)
    sentence = f"{job}: {of} loses less than {loss_max:.0%} against {base}"
    verdict = UNKNOWN if got is None else MET if got > 1 - loss_max else MISSED
    report.judge(case, verdict, sentence + ("" if got is None else f": {got - 1:+.1%} (median of the repetitions' ratios)"))
