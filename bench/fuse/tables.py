"""How the FUSE tables are printed: contestants side by side, and the table of the seed with its change by more queues."""
import seed
from report import SPREAD_MARKED

from fuse.contestants import DAEMONS, DEV_1, DEV_4, HOST
from fuse.verdicts import best, median, shown


def side_by_side(report, jobs, names, others, cells):
    """A row a job; ratios of all but `others` to the best of these, which is starred."""
    if not jobs:
        return
    rows = []
    for job in jobs:
        first, ref = best(cells, job, others)
        row = [str(job)]
        for name in names:
            cell = cells.get((str(job), name))
            text = cell and cell.text(None if name in others else ref, shown(job))
            row.append(f"*{text}" if name == first and len(others) > 1 else text)
        rows.append(row)
    report.table(["job", *names], rows)
    to = "the host's fio on the file" if others == [HOST] else "the daemon's best, which has the *"
    report.line(f"  thousand IOPS (128k: GB/s), medians; xR: ratio to {to}; us: server's CPU time an I/O; "
                f"~: repetitions differ by more than {SPREAD_MARKED:.0%}")


def _change(cells, job, one, four):
    a, b = median(cells, job, one), median(cells, job, four)
    return f"{b / a - 1:+.0%}" if a and b else None


def seeds(report, backend, jobs, cells):
    """The table that started this, measured here: both programs with 1 queue and with 4, and what was published."""
    one, four = DAEMONS[1], DAEMONS[4]
    report.line(f"\n  1 and 4 queues; published: {seed.FUSE_SOURCE}")
    for count in (1, 4):
        rows = []
        for job in jobs:
            if job.jobs != count or job.bs != "4k" or job.awake:
                continue
            row = [str(job)]
            for ours, theirs in ((DEV_1, one), (DEV_4, four)):
                cell = cells.get((str(job), ours))
                row.append(cell and cell.text(median(cells, job, theirs)))
            row.append(_change(cells, job, DEV_1, DEV_4))
            for theirs in (one, four):
                cell = cells.get((str(job), theirs))
                row.append(cell and cell.text(None))
            row += [_change(cells, job, one, four), seed.fuse_text(backend, job.pattern, job.engine, count)]
            rows.append(row)
        if rows:
            report.line(f"  {count} fio job{'s' if count > 1 else ''}:")
            report.table(["job", "vshunt 1 queue", "4 queues", "change", "daemon 1 queue", "4 queues", "change",
                          "published, 1 -> 4 queues"], rows, "  ")
    report.line("  thousand IOPS, medians; xR: ratio to the daemon with as many queues; us: server's CPU time an I/O")


def keep(report, case, cells):
    """For --json."""
    report.data["cases"][case] = {"loads": [
        {"job": j, "contestant": n, "iops": c.median("iops"), "cpu_us": c.median("cpu_us"), "runs": c.runs}
        for (j, n), c in cells.items()]}
