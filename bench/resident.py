"""The cases without load: what an unused export costs (idle), and what its queues weigh (memory)."""
import contextlib
import os
import time

from cases import daemon, vshunt
from frontend import FrontEnd
from report import MET, MISSED, UNKNOWN
from server import TICK_HZ, StartError

IDLE_QUEUES = 16
# Of a core: what two decimals of a percentage show as 0.00 %.
IDLE_CPU_MAX = 0.00005
SETTLE_S = 2
QUEUE_DESCRIPTORS = 256
MEMORY_KIB_MAX = 16 << 10
QUEUE_KIB_MAX = 64
NULL = "format=null,size=1073741824"
DAEMON_NULL = "driver=null-co,size=1073741824,read-zeroes=off"


def idle(b):
    """All servers at once, for they do nothing: CPU time over one window, to the nanosecond where the kernel says."""
    b.report.heading("idle", f"an export of {IDLE_QUEUES} queues, each used once and then left alone")
    each = vshunt(b.tools, NULL, IDLE_QUEUES, "per-queue")
    takers = [("vshunt, no front end", vshunt(b.tools, NULL, IDLE_QUEUES), False, True),
              ("vshunt, connected", vshunt(b.tools, NULL, IDLE_QUEUES), True, True),
              ("vshunt per-queue, connected", each, True, True)]
    if b.tools.qsd:
        takers.append(("storage daemon, connected", daemon(b.tools, DAEMON_NULL, IDLE_QUEUES), True, False))
    window_s = 3 if b.o.quick else 10
    with contextlib.ExitStack() as stack:
        running = []
        for n, (name, argv, connected, _) in enumerate(takers):
            try:
                server = stack.enter_context(b.server(name, argv, f"idle{n}"))
                if connected:
                    stack.enter_context(FrontEnd(server.sock, IDLE_QUEUES, QUEUE_DESCRIPTORS)).touch()
                running.append(server)
            except (StartError, OSError) as e:
                b.report.note(f"idle: {name}: {e}")
                running.append(None)
        b.report.progress(f"idle: {window_s} s")
        time.sleep(SETTLE_S)
        before = [s and (s.cpu_s(), s.cpu_fine_s(), s.wakeups(), time.monotonic()) for s in running]
        time.sleep(window_s)
        after = [s and (s.cpu_s(), s.cpu_fine_s(), s.wakeups(), time.monotonic()) for s in running]
    rows, kept = [], []
    for (name, _, _, ours), x, y in zip(takers, before, after):
        if not x:
            rows.append([name, None, None, None])
            continue
        window = y[3] - x[3]
        ticks_s, fine_s = y[0] - x[0], None if x[1] is None or y[1] is None else y[1] - x[1]
        share = cpu_share(ticks_s, fine_s, window)
        rows.append([name, f"{ticks_s / window:.3%}", None if fine_s is None else f"{fine_s / window:.4%}", f"{(y[2] - x[2]) / window:.1f}"])
        kept.append({"server": name, "share": share, "wakeups_per_s": (y[2] - x[2]) / window, "ours": ours})
    b.report.table(["server", "CPU by stat", "by schedstat", "wake-ups/s"], rows)
    b.report.line(f"  shares of one core over {window_s} s")
    b.report.data["cases"]["idle"] = kept
    b.report.line("  targets:")
    for k in kept:
        if k["ours"]:
            verdict = MET if k["share"] < IDLE_CPU_MAX else MISSED
            b.report.judge("idle", verdict, f"{k['server']}: 0.00 % of a core (less than {IDLE_CPU_MAX:.3%}): {k['share']:.4%}")


def cpu_share(ticks_s, fine_s, window_s):
    """The share of one core that a server used. `fine_s`: that of its living threads, to the nanosecond; None where the kernel does
    not say. Threads that ended are in the ticks only, and one tick may be of time before the window."""
    if fine_s is None:
        return ticks_s / window_s
    return max(ticks_s - 1 / TICK_HZ, fine_s) / window_s


def memory(b):
    """Resident memory with all queues started and each read through: RssAnon + RssFile, for RssShmem is the guest's."""
    b.report.heading("memory", f"resident, with all queues of {QUEUE_DESCRIPTORS} descriptors started and each read through")
    path = os.path.join(b.work, "memory.image")
    with open(path, "wb") as f:
        f.truncate(64 << 20)
    disk = f"file={path}"
    file = f"driver=raw,cache.direct=on,file.driver=file,file.filename={path},file.aio=native,file.cache.direct=on"
    takers = [("vshunt", lambda q: vshunt(b.tools, disk, q), (4, 64, 256)),
              ("vshunt per-queue", lambda q: vshunt(b.tools, disk, q, "per-queue"), (4, 64))]
    if b.tools.qsd:
        takers.append(("storage daemon", lambda q: daemon(b.tools, file, q), (4, 64, 256)))
    rows, own = [], {}
    try:
        for name, argv, counts in takers:
            for queues in counts:
                b.report.progress(f"memory: {name}, {queues} queues")
                try:
                    with b.server(name, argv(queues)) as server, FrontEnd(server.sock, queues, QUEUE_DESCRIPTORS) as front_end:
                        front_end.touch()
                        m = server.memory_kib()
                except (StartError, OSError) as e:
                    b.report.note(f"memory: {name}, {queues} queues: {e}")
                    continue
                own[name, queues] = kib = m["RssAnon"] + m["RssFile"]
                first = own.get((name, counts[0]))
                growth = (kib - first) / (queues - counts[0]) if first and queues > counts[0] else None
                rows.append([name, queues, m["Threads"], m["VmRSS"], m["RssShmem"], kib, growth and f"{growth:.1f}"])
    finally:
        os.unlink(path)
    b.report.table(["server", "queues", "threads", "VmRSS", "guest's (shmem)", "its own", "each further queue"], rows)
    b.report.line("  KiB")
    b.report.data["cases"]["memory"] = [{"server": n, "queues": q, "own_kib": k} for (n, q), k in own.items()]
    b.report.line("  targets:")
    base = own.get(("vshunt", 4))
    verdict = UNKNOWN if base is None else MET if base < MEMORY_KIB_MAX else MISSED
    b.report.judge("memory", verdict, f"4 queues: less than {MEMORY_KIB_MAX >> 10} MiB"
                                      + ("" if base is None else f": {base / 1024:.1f} MiB"))
    for queues in (64, 256):
        kib = own.get(("vshunt", queues))
        growth = None if base is None or kib is None else (kib - base) / (queues - 4)
        verdict = UNKNOWN if growth is None else MET if growth < QUEUE_KIB_MAX else MISSED
        b.report.judge("memory", verdict, f"4 to {queues} queues: less than {QUEUE_KIB_MAX} KiB each"
                                          + ("" if growth is None else f": {growth:.1f} KiB"))
