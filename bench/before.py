"""Whether a change made vshunt slower: this build and another one in pairs, one after the other, the first by turns.

The other program is named by VSHUNT_BEFORE. A pair's ratio is not moved by what the machine does from minute to minute, so the
median of many pairs shows less than three medians of seconds would.
"""
import contextlib
import copy
import os
import statistics

import cases
import net
from fuse import contestants, measure, mount
from fuse.load import Job as FuseJob
from qcow2 import images

# Pairs of each repetition, and seconds of each run.
PAIRS, TIME_S = 7, 1
RUNS = {
    "null": ("rr:1:1", "rr:8:1", "rr:32:1", "rr:128:1", "rr:128:4"),
    "ram": ("rr:32:1:128k", "rw:32:1:128k"),
    "tmpfs": ("rr:128:1", "rw:128:1"),
}
QCOW2 = ("rr:128:1", "rw:128:1", "rr:128:4")
THIN = ("rw:32:1",)
FUSE_NULL = ("psync:rr:1:1", "aio:rr:64:1", "aio:rr:64:4")
NET_USER = ("out:64:1", "in:64:1", "out:1500:2")
JOBS = [*(job for jobs in RUNS.values() for job in jobs), *QCOW2, *THIN, *FUSE_NULL, *NET_USER]
NAMED = [f"{name}:{job}" for name, jobs in [*RUNS.items(), ("qcow2", QCOW2), ("qcow2-thin", THIN), ("fuse-null", FUSE_NULL),
                                            ("net-user", NET_USER)] for job in jobs]
LOSS_MAX = 0.03
THIN_BYTES = 128 << 30


def case(b):
    """Prints what this build does for each thing that the other does: operations a second, and the server's CPU time of each."""
    before = os.environ.get("VSHUNT_BEFORE", "")
    b.report.heading("before", "this build beside the one that VSHUNT_BEFORE names; 1 is the same, more I/O and less CPU are better")
    if not os.access(before, os.X_OK):
        b.report.note("before: left out: set VSHUNT_BEFORE to the vshunt to compare with")
        return
    other = copy.copy(b.tools)
    other.vshunt = before
    client = b.client_of(TIME_S)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(cases.image(b.shm, cases.RAM_BYTES)) if b.shm else None
        runs = [*_sockets(b, client, path), *_qcow2(b, client, stack), *_files(b, client), *_net(b, stack)]
        rows = [_row(b, name, job, run, (b.tools, other)) for name, job, run in runs if _wanted(b, name, job)]
    b.report.table(["", "I/O", "quartiles", "CPU an I/O", "quartiles", "pairs", "loss"], rows, "  ")
    b.report.data["cases"]["before"] = {"rows": rows}


def _wanted(b, name, job):
    """A job may be named with what it runs on (`null:rr:1:1`) or without."""
    return not b.o.jobs or str(job) in b.o.jobs or f"{name}:{job}" in b.o.jobs


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
        if "cpu_us" in after and "cpu_us" in other:
            cpus.append(after["cpu_us"] / other["cpu_us"])
    if len(ios) < 2 or len(cpus) < 2:
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


def _qcow2(b, client, stack):
    """The same for images: one with every cluster written, and a fresh thin one for each run."""
    img = images.tool(b.tools)
    if not img or not b.shm:
        b.report.note(f"before: qcow2: left out: {'no tmpfs with 1.5 GiB free at /dev/shm' if img else 'no qemu-img, which makes the images'}")
        return
    wanted = [name for name, jobs in (("qcow2", QCOW2), ("qcow2-thin", THIN)) if any(_wanted(b, name, job) for job in jobs)]
    both = {}
    if "qcow2" in wanted:
        both["qcow2"] = stack.enter_context(images.written(img, b.shm, cases.RAM_BYTES)).qcow2, QCOW2
    if "qcow2-thin" in wanted:
        thin = images.Thin(img, b.shm, THIN_BYTES)
        stack.enter_context(images.files(thin.template, thin.path))
        both["qcow2-thin"] = thin.qcow2, THIN
    for name, (image, jobs) in both.items():

        def run(tools, job, image=image):
            disk = f"file={image()},format=qcow2,direct=on"
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


def _net(b, stack):
    """A guest's network device on a tap: frames a second, and the server's CPU time of each."""
    short = copy.copy(b)
    short.o = copy.copy(b.o)
    short.o.time = TIME_S
    try:
        inside = stack.enter_context(net.namespace())
    except net.Missing as e:
        b.report.note(f"before: net-user: left out: {e}")
        return

    def run(tools, job):
        taker = net.vshunt(tools, int(job.split(":")[2]))
        return net.guarded(short, "before", inside, "vshunt", taker.argv, job, lambda server: net.load(short, inside, server, job, taker))

    for job in NET_USER:
        yield "net-user", job, run
