"""The qcow2 targets: shares of our own raw, ratios to the storage daemon, growth with queues. Ratios are medians of those
within each repetition."""
from fuse.verdicts import best, paired
from report import MET, MISSED, UNKNOWN


def ratio(report, case, cells, job, ours, others, bound, show):
    """The best of `ours` at least `bound` times the best of `others`, both by their medians."""
    us, _ = best(cells, job, ours)
    them, _ = best(cells, job, others)
    sentence = f"{job}: {' or '.join(ours)} at least {bound:g} x {' or '.join(others)}"
    if hung := [n for n in ours if (c := cells.get((str(job), n))) and c.hung()]:
        report.judge(case, MISSED, f"{sentence}: hung: {', '.join(hung)}")
        return
    got = us and them and paired(cells, job, us, them)
    if not got:
        report.judge(case, UNKNOWN, sentence)
        return
    figures = " to ".join(f"{name} {show(cells[str(job), name].median('iops'))}" for name in (us, them))
    report.judge(case, MET if got >= bound else MISSED, f"{sentence}: x{got:.2f} ({figures})")


def grows(report, case, cells, few, many, ours, show):
    """The best of `ours` is faster at `many`, a job of more queues, than at `few`."""
    sentence = f"{many}: more than {few}"
    (a, slow), (b, fast) = best(cells, few, ours), best(cells, many, ours)
    if not a or not b:
        report.judge(case, UNKNOWN, sentence)
        return
    report.judge(case, MET if fast > slow else MISSED, f"{sentence}: x{fast / slow:.2f} ({b} {show(fast)} to {a} {show(slow)})")


def at_most(report, case, what, got, bound, unit=""):
    """A figure and its bound."""
    verdict = UNKNOWN if got is None else MET if got <= bound else MISSED
    figure = "" if got is None else f": {got:.2f}{unit}"
    report.judge(case, verdict, f"{what} at most {bound:g}{unit}{figure}")
