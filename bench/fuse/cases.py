"""The FUSE cases: an image as one file on the host, vshunt beside QEMU's storage daemon.

fuse-null, fuse-tmpfs and fuse-ext4 measure everything on one backend in one go and print all its tables; fuse-seed
measures and prints only the table that started this, on all three; fuse-queues, whether more queues cost one job
anything. fio is one program for all: the chroot's, where there is one. Targets that are missed are lines, not failures.
"""
import contextlib
import os

import seed
from cases import GRACE_QUICK_S, GRACE_S, RAM_BYTES, can_be_awake, file_system, image
from client import Client

from fuse import floor, tables, verdicts
from fuse.contestants import DAEMONS, DEFAULT, DEV_1, DEV_2, DEV_4, FLOOR_LEGEND, FLOOR_OF, FREE, HOST, LEGEND, PASSTHROUGH, PINNED, Disk, Field
from fuse.load import Job
from fuse.measure import measure
from fuse.mount import private_namespace, uring_problem

NULL = Disk(1 << 30)
WAYS = ("sr", "rr", "sw", "rw")
SEED_JOBS = [f"{engine}:{way}:{depth}:{jobs}" for engine, depth in (("aio", 64), ("psync", 1)) for way in WAYS for jobs in (1, 4)]
LARGE_JOBS = [f"{engine}:{way}:{depth}:{jobs}:128k" for engine, depth in (("psync", 1), ("aio", 16))
              for way in ("sr", "sw") for jobs in (1, 4)]
QUICK_JOBS = ["aio:rr:64:4", "psync:rr:1:1", "psync:sr:1:4:128k"]
JOBS = SEED_JOBS + LARGE_JOBS
QUEUE_JOBS = ["psync:rr:1:1", "psync:rw:1:1"]
QUEUE_REPS_MIN = 5
LOSS_MAX = 0.03


class Fuse:
    """What the FUSE cases have in common: which servers can take part, and how long a run is."""

    def __init__(self, b, rings):
        self.b, self.report = b, b.report
        grace = GRACE_QUICK_S if b.o.quick else GRACE_S
        self.client = Client(b.tools, b.o.time_fuse, grace, None)
        self.field = Field(b.tools, b.o.aa, rings)

    def jobs(self, texts, awake=False):
        """`awake`: jobs that wait for one wake-up after another stand twice, as in the other cases."""
        chosen = [t for t in texts if (t in self.b.o.jobs if self.b.o.jobs else not self.b.o.quick or t in QUICK_JOBS)]
        for text in chosen:
            job = Job.parse(text, self.b.o.awake)
            yield job
            if awake and can_be_awake() and not self.b.o.awake and job.depth == job.jobs == 1:
                yield Job.parse(text, True)

    def floors(self):
        """Those that can be had; none where vshunt has a stand-in (--aa), which is not judged."""
        if self.b.o.aa:
            return []
        channels = self.field.floors(floor.compiled(self.b, "floor.c", "/dev/fuse"))
        if not self.field.rings:
            return channels
        return channels + self.field.floors_ring(floor.compiled(self.b, "floor_uring.c", "FUSE over io_uring"))

    def judged(self):
        """Whether targets are to be judged; their heading."""
        if not self.b.o.aa:
            self.report.line("  targets:")
        return not self.b.o.aa

    def measure(self, case, plan, disk, reps=None):
        cells = measure(self.b, self.client, case, plan, disk, reps or self.b.o.reps)
        tables.keep(self.report, case, cells)
        return cells


@contextlib.contextmanager
def _prepared(b, name, title):
    """-> a Fuse, or None where it cannot be."""
    b.report.heading(name, title)
    problem = None
    if not b.tools.fio_file:
        problem = "no fio"
    else:
        try:
            private_namespace()
        except OSError as e:
            problem = f"no mount namespace of our own: {e}"
    if problem:
        b.report.note(f"{name}: left out: {problem}")
        yield None
        return
    if why_not := uring_problem():
        b.report.note(f"{why_not}: columns of the io_uring transport are left out")
    b.report.line(f"  fio: {' '.join(b.tools.fio_file)}, O_DIRECT, runs of {b.o.time_fuse} s; {LEGEND}")
    if b.o.pin:
        b.report.note("--pin does nothing in the fuse cases: where workers run is what they compare")
    if b.o.aa:
        b.report.note("--aa: in the fuse cases the storage daemon ran in vshunt's place, too, by vshunt's names: what their "
                      "ratios are off 1 is the error of this bench; no targets")
    yield Fuse(b, rings=not why_not)


@contextlib.contextmanager
def _file(b, name, kind):
    """-> a Disk of `kind`, 'tmpfs' or 'ext4', or None with a note."""
    if kind == "tmpfs":
        if not b.shm:
            b.report.note(f"{name}: tmpfs left out: none with 1.5 GiB free at /dev/shm")
            yield None
            return
        with image(b.shm, RAM_BYTES) as path:
            yield Disk(RAM_BYTES, path)
        return
    size = (1 if b.o.quick else 4) << 30
    stat, found = os.statvfs(b.work), file_system(b.work)
    if stat.f_bavail * stat.f_frsize < size + (1 << 30):
        b.report.note(f"{name}: ext4 left out: {b.work} has no room for an image of {size >> 30} GiB")
        yield None
        return
    if found != "ext4":
        b.report.note(f"{name}: {b.work} is on {found}, not ext4")
    with image(b.work, size) as path:
        yield Disk(size, path)


def _with_floors(takers, floors):
    """Each layout's floor right after it: what is compared is measured one after the other."""
    of = {c.name: c for c in floors}
    return [c for taker in takers for c in (taker, of.get(FLOOR_OF.get(taker.name))) if c]


def null(b):
    """No storage: only the kernel's FUSE, the transport and the wake-ups."""
    with _prepared(b, "fuse-null", "a file of 1 GiB with nothing behind it") as f:
        if f is None:
            return
        floors = f.floors()
        if floors:
            b.report.line(f"  {FLOOR_LEGEND}")
        all_of_them = f.field.daemons(1, 2, 4) + f.field.ours(DEFAULT, DEV_1, DEV_4, PINNED, FREE)
        two_queues = f.field.daemons(1, 4) + f.field.ours(DEV_1, DEV_4)
        large = f.field.daemons(1, 2, 4) + f.field.ours(DEV_1, DEV_2, DEV_4, PINNED)
        jobs = list(f.jobs(SEED_JOBS, awake=True))
        large_jobs = list(f.jobs(LARGE_JOBS))
        random = [j for j in jobs if j.pattern in ("rr", "rw")]
        with_floors, large_with_floors = _with_floors(all_of_them, floors), _with_floors(large, floors)
        plan = [(j, with_floors if verdicts.has_floor(j) else all_of_them if j in random else two_queues) for j in jobs]
        plan += [(j, large_with_floors if verdicts.has_floor_large(j) else large) for j in large_jobs]
        cells = f.measure("fuse-null", plan, NULL)
        daemons = list(DAEMONS.values())
        tables.side_by_side(f.report, random, [c.name for c in with_floors], daemons, cells)
        if large_jobs:
            f.report.line()
        tables.side_by_side(f.report, large_jobs, [c.name for c in large_with_floors], daemons, cells)
        tables.seeds(f.report, "null", jobs, cells)
        f.report.seed(seed.PEERS_FUSE_NULL)
        if not f.judged():
            return
        for job in random:
            if job.engine == "aio":
                verdicts.ratio(f.report, "fuse-null", cells, job, [DEV_1, DEV_4, PINNED, FREE], daemons, 4 if job.jobs == 1 else 3)
            else:
                verdicts.ratio(f.report, "fuse-null", cells, job, [PINNED], daemons, 2)
            if job.engine == "psync" and job.jobs == 1:
                verdicts.ratio(f.report, "fuse-null", cells, job, [DEFAULT], daemons, 2)
        for job in large_jobs:
            verdicts.ratio(f.report, "fuse-null", cells, job, [DEV_1, DEV_2, DEV_4, PINNED], daemons, 1)
        verdicts.floors(f.report, "fuse-null", cells, random)
        if large_jobs:
            verdicts.floors_large(f.report, "fuse-null", cells, large_jobs)


def tmpfs(b):
    """A RAM disk, every request through the server."""
    with _prepared(b, "fuse-tmpfs", "raw image of 1 GiB on tmpfs, without passthrough") as f:
        with _file(b, "fuse-tmpfs", "tmpfs") if f else contextlib.nullcontext() as disk:
            if disk is None:
                return
            takers = f.field.daemons(1, 2, 4) + f.field.ours(DEV_1, DEV_4, PINNED)
            jobs = list(f.jobs(SEED_JOBS))
            cells = f.measure("fuse-tmpfs", [(j, takers) for j in jobs], disk)
            daemons = list(DAEMONS.values())
            tables.side_by_side(f.report, jobs, [c.name for c in takers], daemons, cells)
            tables.seeds(f.report, "file", jobs, cells)
            f.report.seed(seed.PEERS_FUSE_TMPFS)
            for job in jobs if f.judged() else ():
                verdicts.ratio(f.report, "fuse-tmpfs", cells, job, [DEV_1, DEV_4, PINNED], daemons, 2)


def ext4(b):
    """A disk: what of the file's own speed is left; with passthrough the kernel does the I/O on the file."""
    with _prepared(b, "fuse-ext4", f"raw image on {file_system(b.work)}, O_DIRECT; passthrough beside fio on the file itself") as f:
        with _file(b, "fuse-ext4", "ext4") if f else contextlib.nullcontext() as disk:
            if disk is None:
                return
            takers = f.field.host() + f.field.ours(PASSTHROUGH, DEV_1, DEV_4) + f.field.daemons(1, 4)
            jobs = list(f.jobs(SEED_JOBS))
            cells = f.measure("fuse-ext4", [(j, takers) for j in jobs], disk)
            tables.side_by_side(f.report, jobs, [c.name for c in takers], [HOST], cells)
            tables.seeds(f.report, "file", jobs, cells)
            for job in jobs if f.judged() else ():
                verdicts.ratio(f.report, "fuse-ext4", cells, job, [PASSTHROUGH], [HOST], 0.9)


def seeds(b):
    """Only the table that started this: null, tmpfs and ext4, two programs with 1 queue and with 4."""
    for kind in ("null", "tmpfs", "ext4"):
        name = f"fuse-seed {kind}"
        with _prepared(b, name, "1 and 4 queues, both programs") as f:
            if f is None:
                return
            with contextlib.nullcontext(NULL) if kind == "null" else _file(b, name, kind) as disk:
                if disk is None:
                    continue
                takers = f.field.daemons(1, 4) + f.field.ours(DEV_1, DEV_4)
                jobs = list(f.jobs(SEED_JOBS))
                cells = f.measure(name, [(j, takers) for j in jobs], disk)
                tables.seeds(f.report, "null" if kind == "null" else "file", jobs, cells)


def queues(b):
    """One synchronous job has no use for more queues; may it lose by them? More repetitions than elsewhere, compared in
    pairs: what is looked for is smaller than what a machine does of itself."""
    with _prepared(b, "fuse-queues", "1 and 4 queues with 1 synchronous job") as f:
        if f is None:
            return
        reps = f.b.o.reps if f.b.o.quick else max(QUEUE_REPS_MIN, f.b.o.reps)
        jobs = list(f.jobs(QUEUE_JOBS, awake=True))
        for kind in ("null", "tmpfs"):
            name = f"fuse-queues {kind}"
            with contextlib.nullcontext(NULL) if kind == "null" else _file(b, name, kind) as disk:
                if disk is None:
                    continue
                takers = f.field.ours(DEV_1, DEV_4) + f.field.daemons(1, 4)
                cells = f.measure(name, [(j, takers) for j in jobs], disk, reps)
                f.report.line(f"\n  {kind}; repetitions: {reps}; change: median of those within each")
                rows = []
                for job in jobs:
                    row = [str(job)]
                    for one, four in ((DEV_1, DEV_4), (DAEMONS[1], DAEMONS[4])):
                        pair = [cells.get((str(job), n)) for n in (one, four)]
                        ratio = verdicts.paired(cells, job, four, one)
                        row += [*(c and c.text(None) for c in pair), ratio and f"{ratio - 1:+.1%}"]
                    way = seed.FUSE["null" if kind == "null" else "file", job.pattern, "psync"][1][1]
                    rows.append([*row, f"{way:+d}%"])
                f.report.table(["job", DEV_1, DEV_4, "change", DAEMONS[1], DAEMONS[4], "change", "published"], rows, "  ")
                for job in jobs if f.judged() else ():
                    verdicts.loss(f.report, name, cells, job, DEV_4, DEV_1, LOSS_MAX)
