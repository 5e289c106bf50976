"""The loop of the qcow2 cases: jobs x contestants x repetitions, contestants in turn, a fresh server for each run."""
from fuse.verdicts import paired
from report import Cell


class Qcow2:
    """What these cases have in common: their own time a run, for these are many."""

    def __init__(self, b):
        self.b, self.report = b, b.report
        self.client = b.client_of(b.o.time_qcow2)

    def runs(self):
        by = "fio" if self.client.tools.fio_blkio else "vshunt-bench"
        return f"runs of {self.b.o.time_qcow2} s by {by}, repetitions: {self.b.o.reps}"

    def measure(self, case, plan):
        """`plan`: [(job, contestants)]. -> {(job, name): Cell}"""
        cells = {}
        for rep in range(self.b.o.reps):
            for job, takers in plan:
                turn = rep % len(takers) if takers else 0
                for contestant in takers[turn:] + takers[:turn]:
                    cell = cells.setdefault((str(job), contestant.name), Cell())
                    if cell.given_up():
                        continue
                    self.report.progress(f"{case}: repetition {rep + 1} of {self.b.o.reps}, {job}, {contestant.name}")
                    cell.add(self.b.run(case, contestant, job, client=self.client))
        return cells

    def table(self, case, plan, cells, base, show):
        """A row a job; ratios to `base`, medians of those within each repetition."""
        names = list(dict.fromkeys(c.name for _, takers in plan for c in takers))
        rows = []
        for job, _ in plan:
            row = [str(job)]
            for name in names:
                cell = cells.get((str(job), name))
                row.append(cell and cell.text(None, show(job)) + self._ratio(paired(cells, job, name, base), name == base))
            rows.append(row)
        self.report.table(["job", *names], rows, "  ")
        self.report.line(f"  medians; us: server's CPU time an I/O; xR: ratio to {base}, median of the repetitions' ratios; "
                         "~: repetitions differ by more than 20%")
        kept = [{"job": j, "contestant": n, "iops": c.median("iops"), "cpu_us": c.median("cpu_us"), "runs": c.runs}
                for (j, n), c in cells.items()]
        self.report.data["cases"].setdefault(case, {})["loads"] = kept

    @staticmethod
    def _ratio(ratio, is_base):
        return "" if ratio is None or is_base else f" x{ratio:.2f}"
