"""What is printed: the machine, tables, targets with met or missed; and the same as JSON."""
import os
import statistics
import sys
from dataclasses import dataclass

# Repetitions that lie further apart than this, against their median, are marked `~`.
SPREAD_MARKED = 0.2
MET, MISSED, UNKNOWN = "met", "MISSED", "not measured"


def rate(iops):
    """1234567 -> '1,235k'."""
    return f"{iops / 1e3:,.0f}k" if iops >= 99_950 else f"{iops / 1e3:.1f}k"


def micros(us):
    return f"{us:.2f}us" if us < 9.95 else f"{us:.1f}us"


class Cell:
    """All runs of one job by one contestant: a list of results, of 'hung' and of 'failed: why'."""

    def __init__(self):
        self.runs = []

    def add(self, run):
        self.runs.append(run)

    def measured(self):
        return [r for r in self.runs if isinstance(r, dict)]

    def hung(self):
        return sum(r == "hung" for r in self.runs)

    def given_up(self):
        """Twice hung or failed: not tried again."""
        return len(self.runs) - len(self.measured()) >= 2

    def median(self, key):
        values = [r[key] for r in self.measured() if key in r]
        return statistics.median(values) if values else None

    def unsteady(self):
        values = [r["iops"] for r in self.measured()]
        return len(values) > 1 and max(values) - min(values) > SPREAD_MARKED * statistics.median(values)

    def text(self, base, show=rate):
        """`base`: what the ratio is to, or None; `show`: how IOPS are written."""
        iops, cpu = self.median("iops"), self.median("cpu_us")
        bad = f"hung {self.hung()}/{len(self.runs)}" if self.hung() else "failed" if len(self.measured()) < len(self.runs) else ""
        if iops is None:
            return bad or "-"
        parts = [show(iops) + ("~" if self.unsteady() else "")]
        if base:
            parts.append(f"x{iops / base:.2f}")
        if cpu is not None:
            parts.append(micros(cpu))
        return " ".join(parts + ([bad] if bad else []))


@dataclass(frozen=True)
class Target:
    """`of`'s figure against `base`'s on one job: 'iops' at least, or 'cpu' (server's, an I/O) at most, `bound` times.
    Several bases: against the best of those that were measured. A bound that excludes itself (`strict`) is for "ahead of"."""
    job: str
    of: str
    base: str | tuple[str, ...]
    key: str
    bound: float
    strict: bool = False

    def judge(self, cells):
        """-> (verdict, sentence)."""
        bases = (self.base,) if isinstance(self.base, str) else self.base
        of, *others = (cells.get((self.job, n)) for n in (self.of, *bases))
        key = {"iops": "iops", "cpu": "cpu_us"}[self.key]
        got = of.median(key) if of else None
        best = max if self.key == "iops" else min
        ref = best((figure for c in others if c and (figure := c.median(key))), default=None)
        what = "IOPS" if self.key == "iops" else "CPU an I/O"
        relation = {("iops", False): "at least", ("iops", True): "more than",
                    ("cpu", False): "at most", ("cpu", True): "less than"}[self.key, self.strict]
        sentence = f"{self.job}: {what} of {self.of} {relation} {self.bound:g} x {' or '.join(bases)}"
        if of and of.hung():
            return MISSED, f"{sentence}: hung {of.hung()} of {len(of.runs)}"
        if got is None or not ref:
            return UNKNOWN, sentence
        ratio = got / ref
        good = ratio >= self.bound if self.key == "iops" else ratio <= self.bound
        met = good and not (self.strict and ratio == self.bound)
        show = rate if self.key == "iops" else micros
        return (MET if met else MISSED), f"{sentence}: x{ratio:.2f} ({show(got)} to {show(ref)})"


class Report:
    """Prints as it goes, and keeps everything for the summary and for --json."""

    def __init__(self):
        self.targets = []
        self.notes = []
        self.data = {"cases": {}}
        self._live = sys.stderr.isatty()

    def progress(self, text):
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def line(self, text=""):
        self.progress("")
        print(text, flush=True)

    def note(self, text):
        """Something left out, hung or failed: said at once and again at the end."""
        if text not in self.notes:
            self.notes.append(text)
            self.line(f"note: {text}")

    def heading(self, name, title):
        self.line(f"\n== {name}: {title}")

    def table(self, columns, rows, indent=""):
        """Columns of text, the first to the left, the others to the right; None is '-'."""
        cells = [[("-" if c is None else f"{c:,}" if isinstance(c, int) else str(c)) for c in row] for row in [columns, *rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        for row in cells:
            first = row[0].ljust(widths[0])
            self.line((indent + first + "".join("  " + c.rjust(w) for c, w in zip(row[1:], widths[1:]))).rstrip())

    def seed(self, *tables):
        for t in tables:
            self.line(f"\n  {t['title']}")
            self.line(f"  ({t['source']})")
            self.table(t["columns"], t["rows"], "    ")

    def loads(self, case, jobs, names, base, cells):
        """The tables of a load case: a row a job, a column a contestant, ratios to `base`; then latencies."""
        rows = []
        for job in map(str, jobs):
            ref = cells[job, base].median("iops") if (job, base) in cells else None
            row = [job]
            for name in names:
                cell = cells.get((job, name))
                row.append(cell.text(None if name == base else ref) if cell else None)
            rows.append(row)
        self.table(["job", *names], rows)
        self.line(f"  thousand IOPS, medians; xR: ratio to {base}; us: server's CPU time an I/O; "
                  f"~: repetitions differ by more than {SPREAD_MARKED:.0%}")
        self._latencies(jobs, names, cells)
        kept = [{"job": j, "contestant": n, **{key: c.median(key) for key in ("iops", "cpu_us", "p99_us")}, "runs": c.runs}
                for (j, n), c in cells.items()]
        self.data["cases"].setdefault(case, {})["loads"] = kept

    def _latencies(self, jobs, names, cells):
        rows = []
        for job in map(str, jobs):
            us = [cells[job, name].median("p99_us") if (job, name) in cells else None for name in names]
            rows.append([job, *(value and f"{value:,.0f}us" for value in us)])
        self.line("\n  99th percentile of the completion latency, medians:")
        self.table(["job", *names], rows, "  ")

    def judge(self, case, verdict, sentence):
        self.targets.append({"case": case, "verdict": verdict, "text": sentence})
        self.line(f"  {verdict:<12}  {sentence}")

    def judge_loads(self, case, targets, cells):
        self.line("  targets:")
        for target in targets:
            self.judge(case, *target.judge(cells))

    def summary(self):
        self.heading("summary", "targets")
        for verdict in (MISSED, UNKNOWN):
            for t in self.targets:
                if t["verdict"] == verdict:
                    self.line(f"  {verdict:<12}  {t['case']}: {t['text']}")
        counts = {v: sum(t["verdict"] == v for t in self.targets) for v in (MET, MISSED, UNKNOWN)}
        self.line("  " + ", ".join(f"{n} {v.lower()}" for v, n in counts.items()) + f", of {len(self.targets)}")
        for note in self.notes:
            self.line(f"  note: {note}")
        self.data.update(targets=self.targets, notes=self.notes)


def machine():
    """The machine, as lines of (what, text)."""
    model, memory = "unknown", 0
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    with open("/proc/meminfo") as f:
        memory = int(f.readline().split()[1])
    release = os.uname()
    return {"cpu": model, "cpus": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**20, 1),
            "kernel": f"{release.sysname} {release.release}", "load": os.getloadavg()[0]}
