"""The case `nbd`: disks on an NBD server, by vshunt's client and by that of QEMU's storage daemon; and `nbd-server`: vshunt as
the server, beside the storage daemon and nbdkit.

In `nbd` the server is nbdkit with a disk in memory, on a UNIX socket. It is started and written once, and all contestants are its
clients in turn. The CPU time is that of the contestant, not of nbdkit. In `nbd-server` the contestants serve a file on a tmpfs, and
fio with libnbd is the client.
"""
import statistics
import subprocess
import time

from cases import EACH, ONE, PEER, Contestant, daemon, image, vshunt
from client import ClientError, Hung, Job
from report import MET, MISSED, UNKNOWN, Target
from server import StartError

JOBS = [f"{rw}:{shape}" for rw in ("rr", "rw") for shape in ("1:1", "32:1", "32:4", "128:4")]
DISK_BYTES = 256 << 20
FIO = "fio, libnbd"
NBDKIT = "nbdkit"
EXPORT = "e"
# With several queues: of the storage daemon's IOPS, and of its CPU time an I/O.
EACH_MIN, EACH_CPU_MAX = 2, 0.5
# With one connection, as the client and as the server: of the storage daemon's IOPS.
ONE_MIN = 1.2
# Sequential reads by one connection: of nbdcopy's rate.
READS = Job("sr", 4, 1, "1m")
COPY_MIN = 1
COPY_LIMIT_S = 60
# As the server, with several connections: of the storage daemon's IOPS.
SERVER_MIN = 2


def case(b):
    """Prints a row for each job, and the targets."""
    b.report.heading("nbd", f"a disk of {DISK_BYTES >> 20} MiB in the memory of nbdkit, over a UNIX socket; 4k; a connection for each worker")
    if not b.tools.nbdkit:
        b.report.note("nbd: left out: no nbdkit")
        return
    try:
        # malloc: the default allocator has one lock for all requests.
        argv = [b.tools.nbdkit, "-f", "-U", "{sock}", "memory", str(DISK_BYTES), "allocator=malloc"]
        with b.server("nbdkit", argv, "nbd") as server:
            _loads(b, server)
            if died := server.died():
                b.report.note(f"nbd: {died}")
    except (ClientError, Hung, StartError, OSError) as e:
        b.report.note(f"nbd: left out: {e or 'the disk cannot be written'}")


def _loads(b, server):
    uri = f"nbd+unix:///?socket={server.sock}"
    disk = f"uri={uri}"
    with b.server(ONE, vshunt(b.tools, disk, 1, "1")) as filler:
        b.client.fill(filler, DISK_BYTES)
    takers = b.with_peer(
        Contestant(PEER, lambda q: daemon(b.tools, f"driver=nbd,server.type=unix,server.path={server.sock}", q)),
        Contestant(ONE, lambda q: vshunt(b.tools, disk, q, "1")),
        Contestant(EACH, lambda q: vshunt(b.tools, disk, q, "per-queue"), many=True))
    if b.tools.fio_nbd:
        takers.insert(0, Contestant(FIO, None))
    else:
        b.report.note("nbd: no fio with libnbd: the figures of a client on the server itself are left out")
    jobs = list(b.jobs(JOBS))
    base = PEER if any(c.name == PEER for c in takers) else ONE
    if jobs:
        b.loads("nbd", jobs, takers, base, targets(jobs), uri)
    if not b.o.jobs or str(READS) in b.o.jobs:
        _sequential(b, uri, disk)


def _sequential(b, uri, disk):
    """Reads the whole disk: nbdcopy, which throws it away, and vshunt with a client that does. Prints their rates."""
    if not b.tools.nbdcopy:
        b.report.note("nbd: no nbdcopy: sequential reads are left out")
        return
    argv = [b.tools.nbdcopy, "--connections=1", uri, "null:"]
    if b.client_cpus:
        argv = ["taskset", "-c", ",".join(map(str, sorted(b.client_cpus))), *argv]
    copies, reads = [], []
    for _ in range(b.o.reps):
        begin = time.monotonic()
        subprocess.run(argv, check=True, capture_output=True, timeout=COPY_LIMIT_S)
        copies.append(DISK_BYTES / (time.monotonic() - begin))
        result = b.run("nbd", Contestant(ONE, lambda q: vshunt(b.tools, disk, q, "1")), READS)
        if isinstance(result, dict):
            reads.append(result["iops"] * (1 << 20))
    rows = [[name, *(f"{rate / (1 << 20):,.0f}" for rate in rates)] for name, rates in (("nbdcopy", copies), (ONE, reads))]
    b.report.table([f"{READS}, MiB/s", *(f"run {n + 1}" for n in range(len(copies)))], rows if len(reads) == len(copies) else rows[:1])
    b.report.data["cases"].setdefault("nbd-sequential", {"nbdcopy": copies, ONE: reads})
    b.report.judge("nbd", *sequential_verdict(copies, reads))


def sequential_verdict(copies, reads):
    """-> (verdict, sentence) about rates, bytes a second."""
    sentence = f"{READS}: rate of {ONE} at least {COPY_MIN:g} x nbdcopy"
    if not copies or not reads:
        return UNKNOWN, sentence
    ratio = statistics.median(reads) / statistics.median(copies)
    return (MET if ratio >= COPY_MIN else MISSED), f"{sentence}: x{ratio:.2f}"


def targets(jobs):
    """What the project set itself, for these jobs."""
    made = []
    for job in jobs:
        made.append(Target(str(job), ONE, PEER, "iops", ONE_MIN))
        if job.queues > 1:
            made += [Target(str(job), EACH, PEER, "iops", EACH_MIN), Target(str(job), EACH, PEER, "cpu", EACH_CPU_MAX)]
    return made


def server(b):
    """Prints a row for each job, and the targets, of vshunt as the server."""
    b.report.heading("nbd-server", f"a file of {DISK_BYTES >> 20} MiB on a tmpfs, served to fio with libnbd over a UNIX socket; 4k; "
                                   "a connection for each of its jobs")
    if not b.shm or not b.tools.fio_nbd:
        b.report.note("nbd-server: left out: no " + ("fio with libnbd in PATH" if b.shm else "tmpfs with 1.5 GiB free at /dev/shm"))
        return
    with image(b.shm, DISK_BYTES) as path:
        takers = b.with_peer(
            Contestant(PEER, lambda _: daemon_export(b.tools, path), nbd=EXPORT),
            Contestant(ONE, lambda _: export(b.tools, path, "1"), nbd=EXPORT),
            Contestant(EACH, lambda _: export(b.tools, path, "per-queue"), nbd=EXPORT, many=True))
        if b.tools.nbdkit:
            argv = [b.tools.nbdkit, "-f", "-U", "{sock}", "-e", EXPORT, "file", path]
            takers.append(Contestant(NBDKIT, lambda _: argv, nbd=EXPORT))
        jobs = list(b.jobs(JOBS))
        base = PEER if any(c.name == PEER for c in takers) else ONE
        goals = [Target(str(job), *((EACH, PEER, "iops", SERVER_MIN) if job.queues > 1 else (ONE, PEER, "iops", ONE_MIN))) for job in jobs]
        b.loads("nbd-server", jobs, takers, base, goals)


def daemon_export(tools, path):
    """The storage daemon as an NBD server. Its main loop serves: with an iothread 7.2 ends with an assertion when a client leaves."""
    return [*tools.qsd, "--blockdev",
            f"driver=raw,node-name=d,cache.direct=on,file.driver=file,file.filename={path},file.aio=native,file.cache.direct=on",
            "--nbd-server", "addr.type=unix,addr.path={sock},max-connections=0",
            "--export", f"nbd,id=e,node-name=d,name={EXPORT},writable=on"]


def export(tools, path, workers):
    """vshunt as an NBD server."""
    spec = f"type=nbd,name={EXPORT},disk=d,listen=unix:{{sock}},writable=on,queues=4,workers={workers}"
    return [tools.vshunt, "serve", "--disk", f"name=d,file={path}", "--export", spec, "--control", "{sock}.control"]
