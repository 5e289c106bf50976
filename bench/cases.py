"""The load cases: null, tmpfs, ext4, workers. Each is jobs x contestants x repetitions.

Contestants take turns within a repetition, and the turn begins with another one in each, so that no one always
follows the same neighbour; each run has a server of its own, started for it. The targets are those that the
project set itself; missing one is a line in the report, not a failure.
"""
import contextlib
import os
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import seed
import spdk
from client import Client, ClientError, Hung, Job
from report import Cell, Target
from server import Server, StartError

# A run may take its own time again and this (connecting and leaving take a second); then it hangs.
GRACE_S, GRACE_QUICK_S = 10, 5
SHAPES = ("1:1", "32:1", "128:1", "128:4")
READS = [f"rr:{shape}" for shape in SHAPES]
READS_WRITES = [f"{rw}:{shape}" for rw in ("rr", "rw") for shape in SHAPES]
NULL_BYTES = spdk.NULL_BYTES
RAM_BYTES = 1 << 30
PEER, PEER_URING, HOST = "storage daemon", "daemon, io_uring", "host fio"
OURS, NO_POLL, ONE, EACH = "vshunt", "vshunt poll-us=0", "vshunt one worker", "vshunt per-queue"


@dataclass(frozen=True)
class Contestant:
    """argv(queues) is a server's; None: the load goes to the disk itself, a file or an NBD server. `many`: only where there are
    several queues. `fill`: so many bytes are written before a run. `nbd`: the server's export for NBD clients, which make the load."""
    name: str
    argv: Callable[[int], list] | None
    many: bool = False
    fill: int = 0
    nbd: str = ""


def daemon(tools, blockdev, queues):
    """QEMU's storage daemon with one iothread (it takes no more for vhost-user-blk)."""
    return [*tools.qsd, "--object", "iothread,id=t0", "--blockdev", f"node-name=d,{blockdev}", "--export",
            f"vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={{sock}},num-queues={queues},writable=on,iothread=t0"]


def daemon_file(tools, path, aio, queues):
    return daemon(tools, f"driver=raw,cache.direct=on,file.driver=file,file.filename={path},file.aio={aio},"
                         "file.cache.direct=on", queues)


def vshunt(tools, disk, queues, workers="default", poll_us=None):
    """`disk` is what stands behind `--disk name=d,`."""
    poll = [] if poll_us is None else ["--poll-us", str(poll_us)]
    export = f"type=vhost-user-blk,name=e,disk=d,socket={{sock}},queues={queues},workers={workers}"
    if poll_us is not None:
        export += f",poll-us={poll_us}"
    return [tools.vshunt, "serve", "--disk", f"name=d,{disk}", "--export", export, *poll, "--control", "{sock}.control"]


def spdk_disks(b, **disks):
    """A contestant for each disk: null=None, malloc=None, aio=FILE, uring=FILE. None of them without SPDK."""
    if not b.tools.spdk:
        return []
    return [Contestant(spdk.NAME if kind == "null" else f"{spdk.NAME} {kind}", lambda _, kind=kind, path=path: spdk.argv(b, kind, path),
                       fill=spdk.MALLOC_BYTES if kind == "malloc" else 0)
            for kind, path in disks.items()]


@contextlib.contextmanager
def awake(yes):
    """CPUs do not sleep while this is held (for everyone: the file is the machine's)."""
    if not yes:
        yield
        return
    fd = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    try:
        os.write(fd, struct.pack("=i", 0))
        yield
    finally:
        os.close(fd)


def can_be_awake():
    return os.access("/dev/cpu_dma_latency", os.W_OK)


@contextlib.contextmanager
def image(folder, size):
    """A file of random bytes, every block allocated and on the disk; removed at the end."""
    path = os.path.join(folder, "image")
    chunk = os.urandom(4 << 20)
    try:
        with open(path, "wb") as f:
            for _ in range(size // len(chunk)):
                f.write(chunk)
            f.flush()
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def halves(cpus, polled):
    """-> (CPUs of the clients, of the servers): half each, where the CPUs that SPDK polls are the servers'. (None, None)
    where there are too few."""
    cpus = [c for c in cpus if c not in polled] + [c for c in cpus if c in polled]
    clients = min(len(cpus) // 2, len(cpus) - len(polled))
    return (cpus[:clients], sorted(cpus[clients:])) if clients > 0 else (None, None)


class Bench:
    """One invocation: options, tools, folders, and the report that everything goes into."""

    def __init__(self, options, tools, work, shm, report):
        self.o, self.tools, self.work, self.shm, self.report = options, tools, work, shm, report
        polled = spdk.cpus(options.spdk_mask) if tools.spdk else []
        self.client_cpus, self.server_cpus = halves(sorted(os.sched_getaffinity(0)), polled) if options.pin else (None, None)
        self.pinned = bool(self.client_cpus)
        self.client = self.client_of(options.time)
        self.hangs = 0

    def client_of(self, time_s):
        """The program that makes the load, in runs of this time."""
        grace_s = GRACE_QUICK_S if self.o.quick else GRACE_S
        return Client(self.tools, time_s, grace_s, self.client_cpus, self.o.wait)

    def server(self, name, argv, sock=spdk.SOCK):
        path = os.path.join(self.work, sock)
        return Server(name, argv, path, f"{path}.log", self.server_cpus)

    def jobs(self, texts):
        """Depth 1 measures wake-ups: with both conditions, if the machine lets us choose."""
        both = can_be_awake() and not self.o.awake
        for text in texts:
            if self.o.jobs and text not in self.o.jobs:
                continue
            job = Job.parse(text, self.o.awake)
            yield job
            if both and job.depth == 1:
                yield Job.parse(text, True)

    def run(self, case, contestant, job, path=None, client=None):
        """-> a result, 'hung', or 'failed: why'. `client`: other than the usual one."""
        client = client or self.client
        try:
            with awake(job.awake):
                if contestant.argv is None:
                    return client.load_disk(job, path)
                with self.server(contestant.name, contestant.argv(job.queues)) as server:
                    if contestant.fill:
                        client.fill(server, contestant.fill)
                    load = client.load_export if contestant.nbd else client.load_socket
                    result = load(job, server, lambda pid: self.autopsy(case, contestant, job, server, pid), *filter(None, [contestant.nbd]))
                    if died := server.died():
                        raise ClientError(died)
            if server.killed:
                self.report.note(f"{case} {job}: {contestant.name} did not end on SIGTERM")
            return result
        except Hung:
            return "hung"
        except (ClientError, StartError, OSError) as e:
            self.report.note(f"{case} {job}: {contestant.name}: {e}")
            return f"failed: {e}"

    def autopsy(self, case, contestant, job, server, client_pid):
        """Of a run that hangs: where everyone stands, into a file that a note names."""
        self.hangs += 1
        name = f"hang-{os.getpid()}-{self.hangs}.txt"
        path = server.autopsy(os.path.join(self.o.results, name), [client_pid])
        control = server.control
        if os.path.exists(control):
            with open(path, "a") as out, contextlib.suppress(subprocess.TimeoutExpired):
                out.write("== status\n")
                out.flush()
                subprocess.run([self.tools.vshunt, "-c", control, "status", "--json"], stdout=out, stderr=out, timeout=5)
        self.report.note(f"{case} {job}: {contestant.name}: hung; "
                         f"it said: {server.said()!r}; where the threads stood: {path}")

    def loads(self, case, jobs, contestants, base, targets, path=None, reps=None, client=None):
        """Runs and prints a load case. -> (job, contestant) to Cell. `reps`, `client`: other than the usual ones."""
        jobs = self._possible(case, jobs, client or self.client)
        cells = {}
        reps = reps or self.o.reps
        for rep in range(reps):
            for job in jobs:
                takers = [c for c in contestants if job.queues > 1 or not c.many]
                turn = rep % len(takers)
                for contestant in takers[turn:] + takers[:turn]:
                    cell = cells.setdefault((str(job), contestant.name), Cell())
                    if cell.given_up():
                        continue
                    self.report.progress(f"{case}: repetition {rep + 1} of {reps}, {job}, {contestant.name}")
                    cell.add(self.run(case, contestant, job, path, client))
        self.report.loads(case, jobs, [c.name for c in contestants], base, cells)
        self.report.judge_loads(case, targets, cells)
        if not can_be_awake():
            self.report.note("depth 1 stands under one condition only: /dev/cpu_dma_latency cannot be held here")
        return cells

    def _possible(self, case, jobs, client):
        """The jobs that the client can run."""
        possible = []
        for job in jobs:
            if why := client.lacks(job):
                self.report.note(f"{case} {job}: left out: {why}")
            else:
                possible.append(job)
        return possible

    def with_peer(self, *contestants):
        """Leaves out those that need what is not there (the notes at the top say so)."""
        missing = set()
        if not self.tools.qsd:
            missing |= {PEER, PEER_URING}
        elif self.tools.bdevperf:
            missing |= {PEER, PEER_URING}
            self.report.note(f"the {PEER} is left out: bdevperf takes its answer to GET_CONFIG for an error")
        if not self.tools.fio_file:
            missing |= {HOST}
        return [c for c in contestants if c.name not in missing]


def null(b):
    """No storage: only rings and notifications. At depth 128 the client is the limit; CPU an I/O counts."""
    disk = f"format=null,size={NULL_BYTES}"
    b.report.heading("null", "no storage behind it, only rings; 4k random reads; vshunt with one worker")
    takers = b.with_peer(
        Contestant(PEER, lambda q: daemon(b.tools, f"driver=null-co,size={NULL_BYTES},read-zeroes=off", q)),
        Contestant(OURS, lambda q: vshunt(b.tools, disk, q)),
        Contestant(NO_POLL, lambda q: vshunt(b.tools, disk, q, poll_us=0)),
        Contestant(EACH, lambda q: vshunt(b.tools, disk, q, "per-queue"), many=True),
        *spdk_disks(b, null=None))
    jobs = list(b.jobs(READS))
    targets = []
    for job in jobs:
        deep = job.depth == 128
        if deep:
            targets.append(Target(str(job), OURS, PEER, "cpu", 0.5))
        elif job.depth == 1:
            targets.append(Target(str(job), OURS, PEER, "iops", 2))
        targets.append(Target(str(job), NO_POLL, PEER, "cpu" if deep else "iops", 1, strict=True))
    b.loads("null", jobs, takers, PEER, targets)
    b.report.seed(seed.PEERS_NULL)


def ram(b):
    """The servers' own disks in memory: rings, and a copy."""
    b.report.heading("ram", f"each server's own disk in memory, {spdk.MALLOC_BYTES >> 20} MiB, every block written beforehand; 4k; the "
                            "base is vshunt with one worker")
    disk = f"format=ram,size={spdk.MALLOC_BYTES}"
    takers = [Contestant(ONE, lambda q: vshunt(b.tools, disk, q), fill=spdk.MALLOC_BYTES),
              Contestant(NO_POLL, lambda q: vshunt(b.tools, disk, q, poll_us=0), fill=spdk.MALLOC_BYTES),
              Contestant(EACH, lambda q: vshunt(b.tools, disk, q, "per-queue"), many=True, fill=spdk.MALLOC_BYTES),
              *spdk_disks(b, malloc=None)]
    jobs = list(b.jobs(READS_WRITES))
    targets = []
    if b.tools.spdk:
        name = f"{spdk.NAME} malloc"
        targets = [Target(str(job), ONE, name, "iops", spdk.FIRST_MIN if job.depth == 1 else spdk.MIN) for job in jobs]
    else:
        b.report.note("ram: no storage daemon has such a disk, and SPDK is not there (--spdk)")
    b.loads("ram", jobs, takers, ONE, targets)


def tmpfs(b):
    """A RAM disk: the engine's own cost."""
    b.report.heading("tmpfs", "raw image on tmpfs, 4k; vshunt with a worker a queue")
    if not b.shm:
        b.report.note("tmpfs: left out: no tmpfs with 1.5 GiB free at /dev/shm")
        return
    with image(b.shm, RAM_BYTES) as path:
        disk = f"file={path}"
        takers = b.with_peer(
            Contestant(PEER, lambda q: daemon_file(b.tools, path, "native", q)),
            Contestant(OURS, lambda q: vshunt(b.tools, disk, q, "per-queue")),
            Contestant(NO_POLL, lambda q: vshunt(b.tools, disk, q, "per-queue", poll_us=0)),
            Contestant(ONE, lambda q: vshunt(b.tools, disk, q)),
            *spdk_disks(b, aio=path, uring=path))
        jobs = list(b.jobs(READS_WRITES))
        # One write at a time mostly measures where threads run. No placement may lose by it.
        targets = [Target(str(job), of, PEER, "iops", 1) for job in jobs if job.depth == 1 and job.rw == "rw" for of in (OURS, ONE)]
        for job in jobs:
            if job.depth == 1:
                targets.append(Target(str(job), OURS, PEER, "iops", 3))
            elif job.depth == 32 or job.queues == 4:
                targets.append(Target(str(job), OURS, PEER, "iops", 1.9))
            if job.queues == 4:
                targets.append(Target(str(job), OURS, PEER, "cpu", 0.5))
            targets.append(Target(str(job), NO_POLL, PEER, "iops", 1, strict=True))
        b.loads("tmpfs", jobs, takers, PEER, targets)
    b.report.seed(seed.PEERS_TMPFS, seed.VHOST_BLK_RAM)


def ext4(b):
    """A disk: what of the host's own speed a guest gets."""
    size = (1 if b.o.quick else 4) << 30
    kind = file_system(b.work)
    b.report.heading("ext4", f"raw image of {size >> 30} GiB on {kind}, O_DIRECT, 4k; the base is the host's own fio on the file; "
                             "vshunt with one worker")
    stat = os.statvfs(b.work)
    if stat.f_bavail * stat.f_frsize < size + (1 << 30):
        b.report.note(f"ext4: left out: {b.work} has no room for an image of {size >> 30} GiB")
        return
    if kind in ("tmpfs", "overlay"):
        b.report.note(f"ext4: {b.work} is on {kind}, not on a disk: set VSHUNT_PEERS to a folder that is")
    with image(b.work, size) as path:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        except OSError as e:
            b.report.note(f"ext4: left out: no O_DIRECT on {kind}: {e}")
            return
        disk = f"file={path},direct=on"
        takers = b.with_peer(
            Contestant(HOST, None),
            Contestant(PEER, lambda q: daemon_file(b.tools, path, "native", q)),
            Contestant(PEER_URING, lambda q: daemon_file(b.tools, path, "io_uring", q)),
            Contestant(OURS, lambda q: vshunt(b.tools, disk, q)),
            Contestant(EACH, lambda q: vshunt(b.tools, disk, q, "per-queue"), many=True),
            *spdk_disks(b, aio=path, uring=path))
        jobs = list(b.jobs(READS_WRITES))
        targets = [Target(str(job), OURS, HOST, "iops", 0.95 if job.depth == 1 else 0.97) for job in jobs]
        targets += [Target(str(job), OURS, (PEER, PEER_URING), "iops", 1) for job in jobs]
        b.loads("ext4", jobs, takers, HOST, targets, path)
    b.report.seed(seed.PEERS_EXT4, seed.VHOST_BLK_SSD)


def workers(b):
    """Two workers against one where the server's CPU is the limit: large blocks copied from a RAM disk."""
    b.report.heading("workers", "RAM disk, 4 queues, by one worker, by two, by one a queue; 64k blocks make the server's CPU the limit")
    if len(os.sched_getaffinity(0)) < 2:
        b.report.note("workers: left out: needs two CPUs")
        return
    disk = f"format=ram,size={RAM_BYTES}"
    takers = [Contestant("one", lambda q: vshunt(b.tools, disk, q, "1")),
              Contestant("two", lambda q: vshunt(b.tools, disk, q, "2")),
              Contestant(EACH, lambda q: vshunt(b.tools, disk, q, "per-queue"))]
    jobs = [Job.parse(t, b.o.awake) for t in ("rr:32:4:64k", "rw:32:4:64k", "rr:128:4")]
    targets = [Target(str(job), "two", "one", "iops", 1, strict=True) for job in jobs[:2]]
    b.loads("workers", jobs, takers, "one", targets)
    table = [b.tools.bench, "workers", "--vshunt", b.tools.vshunt]
    table += ["--jobs", "1,4", "--runtime", "0.5s"] if b.o.quick else ["--runtime", "1.5s"]
    b.report.seed(seed.VHOST_WORKERS)
    if not b.tools.bench or subprocess.run([*table[:2], "--help"], capture_output=True).returncode:
        b.report.note("workers: no `vshunt-bench workers` here: its table is left out")
        return
    b.report.line("\n  vshunt-bench workers:")
    b.report.progress("workers: vshunt-bench workers")
    try:
        done = subprocess.run(table, capture_output=True, text=True, timeout=300)
        text = done.stdout if done.returncode == 0 else f"failed: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        text = "hung"
        b.report.note("workers: `vshunt-bench workers` hung")
    b.report.line("\n".join("    " + line for line in text.rstrip().splitlines()))
    b.report.data["cases"]["workers"]["vshunt_bench"] = text


def file_system(path):
    """The type of the file system that `path` lies on."""
    best, kind = "", "unknown"
    with open("/proc/mounts") as f:
        for line in f:
            where, what = line.split()[1:3]
            inside = path == where or path.startswith(where.rstrip("/") + "/")
            if inside and len(where) >= len(best):
                best, kind = where, what
    return kind
