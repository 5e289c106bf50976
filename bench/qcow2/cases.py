"""The qcow2 cases, all over vhost-user-blk with O_DIRECT: images of which every cluster was written (qcow2-tmpfs, where
memory is behind it; qcow2-ext4, where a disk is), thin images whose writes allocate (qcow2-thin, on both), and a disk of
2 TiB whose map does not fit into memory (qcow2-large). Targets that are missed are lines, not failures.
"""
import math
import os
import statistics

import seed
from cases import file_system
from client import ClientError, Hung, Job
from report import rate
from server import StartError

from qcow2 import verdicts
from qcow2.images import EACH, LEGEND, OURS, PEER, PEER_URING, RAW, RAW_EACH, Thin, files, ours, peer, qemu_img, tool, written
from qcow2.measure import Qcow2

GIB = 1 << 30
WRITTEN_BYTES = GIB
WRITTEN_JOBS = [f"{rw}:{depth}:{queues}" for rw in ("rr", "rw") for depth in (32, 128) for queues in (1, 4)]
WRITTEN_QUICK = ["rr:128:1", "rr:128:4", "rw:128:1", "rw:128:4"]
CLUSTER_BYTES = 64 << 10
# So large that in a run of a second or two hardly a block is drawn twice; its map is 16 MiB and
# stays in memory.
THIN_BYTES = 128 * GIB
# Each cluster that is allocated takes 64 KiB of the file (4 KiB with vshunt on tmpfs).
THIN_ROOM_BYTES = 8 * GIB
THIN_DEPTHS, THIN_QUEUES = (32, 128), (1, 2, 4)
THIN_JOBS = [f"rw:{depth}:{queues}" for depth in THIN_DEPTHS for queues in THIN_QUEUES]
THIN_QUICK = ["rw:32:1", "rw:32:4"]
SEQUENTIAL = "sw:16:1:1M"
LARGE_BYTES = 2 << 40
LARGE_JOB = "rr:32:1"
LARGE_TIME_S = 2
# What is read of the map at a time: a slice, of which the daemon's default is as large as ours.
MAP_READ_BYTES = 4096
CACHE_DEFAULT = 32 << 20
CACHE_SMALL = 4 << 20
# Beside the map: what requests hold that are under way.
RESIDENT_BESIDE = 2 << 20
READS_A_REQUEST_MAX = 1.2
JOBS = [*WRITTEN_JOBS, *THIN_JOBS, SEQUENTIAL]


def show(job):
    """How IOPS of this job are written."""
    return rate if job.bs == "4k" else lambda iops: f"{iops / 1024:.2f}GiB/s"


def _jobs(b, texts, quick):
    chosen = [t for t in texts if (t in b.o.jobs if b.o.jobs else not b.o.quick or t in quick)]
    return [Job.parse(t, b.o.awake) for t in chosen]


def usable(b, name, title, folder, need):
    """-> (a Qcow2, qemu-img), or None with a note."""
    b.report.heading(name, title)
    img = tool(b.tools)
    if not img:
        b.report.note(f"{name}: left out: no qemu-img, which makes the images")
        return None
    if not folder:
        b.report.note(f"{name}: left out: no tmpfs at /dev/shm")
        return None
    stat = os.statvfs(folder)
    if stat.f_bavail * stat.f_frsize < need:
        b.report.note(f"{name}: left out: it needs {need >> 30} GiB free in {folder}")
        return None
    q = Qcow2(b)
    b.report.line(f"  {q.runs()}; {LEGEND}")
    return q, img


def _written(b, name, folder, memory):
    kind = file_system(folder) if folder else "tmpfs"
    behind = "memory behind it: the engine is the limit" if memory else "a disk behind it: the device is the limit"
    ready = usable(b, name, f"image of {WRITTEN_BYTES >> 30} GiB on {kind}, every cluster written, 4k; {behind}", folder,
                   3 * WRITTEN_BYTES)
    jobs = _jobs(b, WRITTEN_JOBS, WRITTEN_QUICK)
    if not ready or not jobs:
        return
    q, img = ready
    try:
        with written(img, folder, WRITTEN_BYTES) as image:
            takers = [peer(b.tools, image.qcow2)]
            ring = [peer(b.tools, image.qcow2, PEER_URING, "io_uring")]
            mine = [ours(b.tools, image.raw, RAW, "1", "raw"), ours(b.tools, image.qcow2, OURS, "1"),
                    ours(b.tools, image.raw, RAW_EACH, "per-queue", "raw"), ours(b.tools, image.qcow2, EACH, "per-queue")]
            # With io_uring and several queues the daemon ends in the middle (see README, Hangs);
            # one row shows how fast it is.
            plan = []
            for job in jobs:
                others = takers + ring if (job.depth, job.queues) == (128, 1) else takers
                plan.append((job, others + [c for c in mine if job.queues > 1 or not c.many]))
            cells = q.measure(name, plan)
    except OSError as e:
        b.report.note(f"{name}: {e}")
        return
    q.table(name, plan, cells, PEER, show)
    b.report.line("  targets:" if memory else "  targets (against the daemon none: the device is the limit):")
    for job in jobs:
        for of, base in [(OURS, RAW), (EACH, RAW_EACH)][:1 if job.queues == 1 else 2]:
            verdicts.ratio(b.report, name, cells, job, [of], [base], 0.97, rate)
        if memory:
            verdicts.ratio(b.report, name, cells, job, [OURS, EACH][:job.queues], [PEER, PEER_URING], 2, rate)


def tmpfs(b):
    """The engine's own cost, of the map above all."""
    _written(b, "qcow2-tmpfs", b.shm, memory=True)
    b.report.seed(seed.PEERS_QCOW2)


def ext4(b):
    """What is left of a disk's own speed."""
    _written(b, "qcow2-ext4", b.work, memory=False)
    b.report.seed(seed.PEERS_QCOW2)


def thin(b):
    """Writes that allocate: nearly each one a cluster of its own."""
    for kind, folder in (("tmpfs", b.shm), ("ext4", b.work)):
        name = f"qcow2-thin {kind}"
        found = file_system(folder) if folder else kind
        ready = usable(b, name, f"thin image of {THIN_BYTES >> 30} GiB on {found}, a fresh one for each run; 4k writes "
                                "at random, 1M writes in turn", folder, THIN_ROOM_BYTES)
        jobs = _jobs(b, [*THIN_JOBS, SEQUENTIAL], [*THIN_QUICK, SEQUENTIAL])
        if ready and jobs:
            _thin(*ready, name, folder, jobs)
    b.report.seed(seed.PEERS_QCOW2)


def _thin(q, img, name, folder, jobs):
    b, random = q.b, [j for j in jobs if j.rw == "rw"]
    try:
        images = Thin(img, folder, THIN_BYTES)
        with files(images.template, images.path):
            one, each = (ours(b.tools, images.qcow2, n, w) for n, w in ((OURS, "1"), (EACH, "per-queue")))
            daemon, ring = peer(b.tools, images.qcow2), peer(b.tools, images.qcow2, PEER_URING, "io_uring")
            raw = ours(b.tools, images.raw, RAW, "1", "raw")
            plan = []
            for job in jobs:
                takers = [daemon, ring] if (job.depth, job.queues) == (128, 1) or job not in random else [daemon]
                takers = takers if job in random else [*takers, raw]
                plan.append((job, takers + [one] + ([each] if job.queues > 1 else [])))
            cells = q.measure(name, plan)
    except OSError as e:
        b.report.note(f"{name}: {e}")
        return
    q.table(name, plan, cells, PEER, show)
    _say_share(b, cells, random)
    b.report.line("  targets:")
    by_shape = {(j.depth, j.queues): j for j in random}
    for job in random:
        verdicts.ratio(b.report, name, cells, job, [OURS, EACH][:job.queues], [PEER, PEER_URING], 3, rate)
    for depth in THIN_DEPTHS:
        for few, many in ((1, 2), (1, 4)):
            if (depth, few) in by_shape and (depth, many) in by_shape:
                verdicts.grows(b.report, name, cells, by_shape[depth, few], by_shape[depth, many], [OURS, EACH], rate)
    for job in jobs:
        if job not in random:
            verdicts.ratio(b.report, name, cells, job, [OURS], [RAW], 0.85, show(job))


def _say_share(b, cells, random):
    """How many of the fastest run's writes allocated: each run draws other blocks."""
    ran = [cells[str(j), n] for j in random for n in (OURS, EACH) if (str(j), n) in cells]
    most = max((r["ios"] for cell in ran for r in cell.measured()), default=0)
    if most:
        clusters = THIN_BYTES // CLUSTER_BYTES
        share = clusters / most * (1 - math.exp(-most / clusters))
        b.report.line(f"  of the {most:,} writes of the fastest run {share:.0%} allocated a cluster")


def large(b):
    """What of the map is read again, where memory has room for an eighth of it."""
    name = "qcow2-large"
    kind = file_system(b.work)
    ready = usable(b, name, f"a disk of 2 TiB on {kind}, its map filled, {LARGE_JOB} over all of it; data are holes, so that "
                            "what is read of the device is the map", b.work, GIB)
    if not ready or (b.o.jobs and LARGE_JOB not in b.o.jobs):
        return
    q, img = ready
    with files(os.path.join(b.work, "large.qcow2")) as (path,):
        b.report.progress(f"{name}: the image")
        try:
            qemu_img([*img, "create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", path, str(LARGE_BYTES)])
        except OSError as e:
            b.report.note(f"{name}: {e}")
            return
        takers = [(peer(b.tools, lambda: path), CACHE_DEFAULT),
                  (ours(b.tools, lambda: path, OURS, "1"), CACHE_DEFAULT),
                  (ours(b.tools, lambda: path, f"{OURS}, 4 MiB", "1", cache=CACHE_SMALL), CACHE_SMALL)]
        runs = {c.name: [r for _ in range(b.o.reps) if (r := _large_run(q, name, c))] for c, _ in takers}
    _large_say(b, name, takers, runs)


def _large_run(q, name, contestant):
    """-> what a run read and held, or None."""
    b, job = q.b, Job.parse(LARGE_JOB, q.b.o.awake)
    client = q.client
    time_s, client.time_s = client.time_s, max(client.time_s, LARGE_TIME_S)
    b.report.progress(f"{name}: {contestant.name}")
    try:
        with b.server(contestant.name, contestant.argv(job.queues)) as server:
            before, held = _read_bytes(server.pid), server.memory_kib()["RssAnon"]
            result = client.load_socket(job, server, lambda pid: b.autopsy(name, contestant, job, server, pid))
            read = _read_bytes(server.pid) - before
            return {**result, "reads": read / MAP_READ_BYTES / result["ios"], "read_bytes": read / result["ios"],
                    "held_mib": (server.memory_kib()["RssAnon"] - held) / 1024}
    except (Hung, ClientError, StartError, OSError, KeyError, ZeroDivisionError) as e:
        b.report.note(f"{name}: {contestant.name}: {e or 'hung'}")
        return None
    finally:
        client.time_s = time_s


def _read_bytes(pid):
    """Bytes that a process had read from devices."""
    with open(f"/proc/{pid}/io") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("read_bytes"))


def _large_say(b, name, takers, runs):
    rows, medians = [], {}
    for contestant, cache in takers:
        if not runs[contestant.name]:
            rows.append([contestant.name, f"{cache >> 20} MiB", *[None] * 5])
            continue
        m = medians[contestant.name] = {k: statistics.median(r[k] for r in runs[contestant.name])
                                        for k in ("iops", "cpu_us", "reads", "read_bytes", "held_mib")}
        rows.append([contestant.name, f"{cache >> 20} MiB", f"{rate(m['iops'])} {m['cpu_us']:.1f}us", f"{m['reads']:.2f}",
                     f"{m['read_bytes'] / 1024:.1f} KiB", f"{m['held_mib']:.1f} MiB"])
    b.report.table(["", "cache", "IOPS, CPU", "map reads a request", "bytes", "memory grew by"], rows, "  ")
    b.report.line("  map reads: bytes read of the device / 4 KiB; memory: private, grown in the run")
    b.report.data["cases"][name] = {"runs": runs}
    b.report.line("  targets:")
    for contestant, cache in takers:
        if contestant.name == PEER:
            continue
        m = medians.get(contestant.name, {})
        if cache == CACHE_DEFAULT:
            verdicts.at_most(b.report, name, f"{contestant.name}, default cache: map reads a request", m.get("reads"),
                             READS_A_REQUEST_MAX)
        bound = (cache + RESIDENT_BESIDE) >> 20
        verdicts.at_most(b.report, name, f"{contestant.name}: memory for a cache of {cache >> 20} MiB", m.get("held_mib"),
                         bound, " MiB")
