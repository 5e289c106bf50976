"""Whether a change made vshunt slower: this build and another one in pairs, one after the other, the first by turns.

The other program is named by VSHUNT_BEFORE. A pair's ratio is not moved by what the machine does from minute to minute, so the
median of many pairs shows less than three medians of seconds would.
"""
import contextlib
import copy
import os
import statistics

import cases
from client import Client
from fuse import contestants, measure, mount
from fuse.load import Job as FuseJob

# Pairs of each repetition, and seconds of each run.
PAIRS, TIME_S = 7, 1
RUNS = {
    "null": ("rr:1:1", "rr:128:1", "rr:128:4"),
    "ram": ("rr:32:1:128k", "rw:32:1:128k"),
    "tmpfs": ("rr:128:1", "rw:128:1"),
}
FUSE_NULL = ("psync:rr:1:1", "aio:rr:64:1", "aio:rr:64:4")
JOBS = [*(job for jobs in RUNS.values() for job in jobs), *FUSE_NULL]
LOSS_MAX = 0.03


def case(b):
    """Prints what this build does for each thing that the other does: operations a second, and the server's CPU time of each."""
    before = os.environ.get("VSHUNT_BEFORE", "")
    b.report.heading("before", "this build beside the one that VSHUNT_BEFORE names; 1 is the same, more I/O and less CPU are better")
    if not os.access(before, os.X_OK):
        b.report.note("before: left out: set VSHUNT_BEFORE to the vshunt to compare with")
        return
    other = copy.copy(b.tools)
    other.vshunt = before
    client = Client(b.tools, TIME_S, cases.GRACE_S, b.client_cpus)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(cases.image(b.shm, cases.RAM_BYTES)) if b.shm else None
        runs = [*_sockets(b, client, path), *_files(b, client)]
        rows = [_row(b, name, job, run, (b.tools, other)) for name, job, run in runs if not b.o.jobs or str(job) in b.o.jobs]
    b.report.table(["", "I/O", "quartiles", "CPU an I/O", "quartiles", "pairs", "loss"], rows, "  ")
    b.report.data["cases"]["before"] = {"rows": rows}


def _row(b, name, job, run, both):
    ios, cpus = [], []
    pairs = PAIRS * b.o.reps
    for pair in range(pairs):
        b.report.progress(f"before: {name} {job}, pair {pair + 1} of {pairs}")
        turn = (0, 1) if pair % 2 else (1, 0)
        results = {which: run(both[which], job) for which in turn}
        if any(isinstance(result, str) for result in results.values()):
            continue
        after, other = results[0], results[1]
        ios.append(after["iops"] / other["iops"])
        cpus.append(after["cpu_us"] / other["cpu_us"])
    if len(ios) < 2:
        return [f"{name} {job}", None, None, None, None, len(ios), "failed"]
    middle = statistics.median(ios)
    # What the pairs cannot tell from no loss is none.
    surely = statistics.quantiles(ios, n=4)[2] < 1 - LOSS_MAX
    verdict = f"{1 - middle:.1%}" if middle < 1 - LOSS_MAX else "-"
    return [f"{name} {job}", f"{middle:.3f}", _quartiles(ios), f"{statistics.median(cpus):.3f}", _quartiles(cpus), len(ios),
            f"{verdict}, surely" if surely else verdict]


def _quartiles(ratios):
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{low:.3f} to {high:.3f}"


def _sockets(b, client, path):
    """-> (name, job, run(tools, job)) for each. `path`: an image on a tmpfs, or None."""
    disks = {"null": f"format=null,size={cases.NULL_BYTES}", "ram": f"format=ram,size={cases.RAM_BYTES}", "tmpfs": f"file={path}"}
    for name, jobs in RUNS.items():
        if name == "tmpfs" and not path:
            b.report.note("before: tmpfs: left out: no tmpfs with 1.5 GiB free at /dev/shm")
            continue

        def run(tools, job, disk=disks[name]):
            return b.run("before", cases.Contestant("vshunt", lambda q: cases.vshunt(tools, disk, q)), job, client=client)

        for job in jobs:
            yield name, cases.Job.parse(job, b.o.awake), run


def _files(b, client):
    """The same for a mount."""
    try:
        mount.private_namespace()
    except OSError as e:
        b.report.note(f"before: fuse-null: left out: {e}")
        return
    if not b.tools.fio_file:
        b.report.note("before: fuse-null: left out: no fio")
        return
    disk = contestants.Disk(cases.RAM_BYTES)

    def run(tools, job):
        one, = contestants.Field(tools, False, False).ours(contestants.DEV_1)
        cell, = measure.measure(b, client, "before", [(job, [one])], disk, 1).values()
        return cell.runs[-1] if cell.runs else "failed"

    for job in FUSE_NULL:
        yield "fuse-null", FuseJob.parse(job, b.o.awake), run
