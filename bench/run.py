"""`make bench`: vshunt beside its peers. Options, set-up, the cases in turn, the summary. See README.md here.

One thread, one server and one client at a time. A missed target is a line; the exit status is 0 unless the
bench itself could not run (1) or was asked wrongly (2).
"""
import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

import balance
import before
import cases
import depth
import kernel
import nbd
import net
import net_switch
import net_tcp
import resident
import spdk
from fuse import cases as fuse
from qcow2 import backup
from qcow2 import cases as qcow2
from report import Report, machine

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# In the order in which they run: the curve over depth comes first, because most decisions need it.
CASES = {"depth": depth.case, "null": cases.null, "ram": cases.ram, "tmpfs": cases.tmpfs, "ext4": cases.ext4,
         "workers": cases.workers, "balance": balance.case,
         "nbd": nbd.case, "nbd-server": nbd.server,
         "idle": resident.idle, "memory": resident.memory,
         "fuse-null": fuse.null, "fuse-tmpfs": fuse.tmpfs, "fuse-ext4": fuse.ext4, "fuse-queues": fuse.queues,
         "kernel": kernel.case,
         "net-tap": net.tap, "net-user": net.user, "net-switch": net_switch.case, "net-guest": net_tcp.case,
         "qcow2-tmpfs": qcow2.tmpfs, "qcow2-ext4": qcow2.ext4, "qcow2-thin": qcow2.thin, "qcow2-large": qcow2.large,
         "qcow2-backup": backup.backup, "qcow2-mirror": backup.mirror}
# Only where it is asked for: what it measures is within the others.
EXTRA = {"fuse-seed": fuse.seeds, "before": before.case}
GROUPS = {group: [c for c in CASES if c.startswith(f"{group}-")] for group in ("fuse", "qcow2", "net")}
GROUPS["qcow2-read"] = ["qcow2-tmpfs", "qcow2-ext4"]
SHM_BYTES_MIN = 3 << 29
PREFIX = "vshunt-bench."


@dataclass
class Tools:
    """The programs, each as the beginning of an argv; empty where there is none."""
    vshunt: str = ""
    bench: str = ""
    root: str = ""
    qsd: list = field(default_factory=list)
    fio_blkio: list = field(default_factory=list)
    fio_file: list = field(default_factory=list)
    fio_nbd: list = field(default_factory=list)
    nbdkit: str = ""
    nbdcopy: str = ""
    testpmd: list = field(default_factory=list)
    cloud_net: str = ""
    spdk: list = field(default_factory=list)
    spdk_mask: int = 0
    bdevperf: list = field(default_factory=list)
    versions: dict = field(default_factory=dict)


def mask(text):
    return int(text, 16)


def arguments():
    p = argparse.ArgumentParser(prog="scripts/bench", description="vshunt beside QEMU's storage daemon and the host's own fio.",
                                epilog="Environment: VSHUNT_PEERS, where the peers are set up (default /var/tmp/vshunt-peers); "
                                       "VSHUNT_CH_NET, cloud-hypervisor's vhost_user_net; VSHUNT_SPDK, as --spdk; "
                                       "VSHUNT_BEFORE, another vshunt, for the case `before`; VSHUNT_NO_INSTALL=1, set nothing up.")
    p.add_argument("--quick", action="store_true", help="one repetition (depth: three) of one second: whether it works, not how fast it is")
    p.add_argument("--only", metavar="CASE", action="append", default=[],
                   help=f"{', '.join([*CASES, *EXTRA])}; fuse, qcow2, net: all that begin so; may be repeated, or a list with commas")
    p.add_argument("--jobs", metavar="JOB,JOB", type=lambda text: text.split(","),
                   help="of null, depth, tmpfs, ext4, nbd, nbd-server and the qcow2 cases only these rows, such as rr:1:1,rw:128:4; "
                        "of the fuse cases such as psync:rr:1:4; of before with its name, too, such as qcow2:rr:128:1")
    p.add_argument("--reps", type=int, help="repetitions, of which the median counts (3; depth 5)")
    p.add_argument("--time", type=int, metavar="S", help="seconds of each run (4; fuse and depth 2; qcow2 1)")
    p.add_argument("--json", metavar="FILE", help="every run's figures, too")
    p.add_argument("--pin", action="store_true", help="servers on one half of the CPUs, clients on the other")
    p.add_argument("--awake", action="store_true", help="hold /dev/cpu_dma_latency at 0 in every run, not only in rows that say so")
    p.add_argument("--client", choices=["fio", "vshunt-bench", "bdevperf"],
                   help="what makes the load (fio with libblkio, where there is one); bdevperf is SPDK's, which polls")
    p.add_argument("--wait", choices=["block", "loop"], default="block",
                   help="how the client waits for completions: block, in the kernel; loop, it polls, which needs fio (block)")
    p.add_argument("--spdk", metavar="FOLDER", default=os.environ.get("VSHUNT_SPDK", ""),
                   help="a build tree of SPDK: its vhost takes part in null, depth, ram, tmpfs and ext4")
    p.add_argument("--spdk-mask", metavar="MASK", type=mask, default=1,
                   help="the CPUs that SPDK polls, in hexadecimal (0x1); with --pin clients run on others")
    p.add_argument("--aa", action="store_true", help="fuse: the storage daemon in vshunt's place, too: how far the ratios can be trusted")
    o = p.parse_args()
    reps = o.reps
    o.reps = (1 if o.quick else 3) if reps is None else reps
    o.time_fuse = (1 if o.quick else 2) if o.time is None else o.time
    o.reps_depth = (3 if o.quick else 5) if reps is None else reps
    o.time_depth = (1 if o.quick else 2) if o.time is None else o.time
    o.time_qcow2 = 1 if o.time is None else o.time
    o.time = (1 if o.quick else 4) if o.time is None else o.time
    if o.reps < 1 or o.time < 1:
        p.error("--reps and --time are 1 or more")
    asked = [c for text in o.only for c in text.split(",") if c] or list(CASES)
    o.only = [c for a in asked for c in GROUPS.get(a, [a])]
    if unknown := [c for c in o.only if c not in CASES | EXTRA]:
        p.error(f"no case {unknown[0]}; there are {', '.join([*CASES, *EXTRA, *GROUPS])}")
    jobs = cases.READS_WRITES + depth.JOBS + nbd.JOBS + [str(nbd.READS)] + fuse.JOBS + qcow2.JOBS + before.JOBS + before.NAMED
    if unknown := [j for j in o.jobs or () if j not in jobs]:
        p.error(f"no job {unknown[0]}; there are {', '.join(jobs)}")
    if o.client == "bdevperf" and not o.spdk:
        p.error("--client bdevperf: name the folder where SPDK is built with --spdk (VSHUNT_SPDK)")
    if o.wait == "loop" and o.client not in (None, "fio"):
        p.error(f"--wait loop is for fio, not for {o.client}")
    if o.spdk and (why := spdk.refused(o.spdk, o.spdk_mask, o.client)):
        p.error(why)
    if o.json:  # now, not after half an hour
        try:
            open(o.json, "a").close()
        except OSError as e:
            p.error(f"--json: {e}")
    if o.awake and not cases.can_be_awake():
        p.error("--awake: /dev/cpu_dma_latency cannot be written: be root")
    return o


def first_line(argv):
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.splitlines() or [""])[0] if done.returncode == 0 else ""


def find_tools(o, report):
    """-> (tools, the folder to work in). Sets the peers up if that has to be and can be."""
    tools = Tools()
    folder = os.environ.get("VSHUNT_BIN") or os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(TOP, "target")), "release")
    tools.vshunt, tools.bench = os.path.join(folder, "vshunt"), os.path.join(folder, "vshunt-bench")
    if not (version := first_line([tools.vshunt, "--version"])):
        sys.exit(f"bench: no {tools.vshunt} that runs; build it: make build")
    tools.versions["vshunt"] = version
    if "blk" not in (subprocess.run([tools.bench, "--help"], capture_output=True, text=True).stdout
                     if os.path.exists(tools.bench) else ""):
        tools.bench = ""
    found = {"note": []}
    env = os.environ | ({"VSHUNT_PEERS_NET": "1"} if any(c in GROUPS["net"] for c in o.only) else {})
    done = subprocess.run([os.path.join(TOP, "bench", "peers.sh")], stdout=subprocess.PIPE, text=True, env=env)
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        if key == "note":
            found["note"].append(value)
        else:
            found[key] = value
    if done.returncode:
        found["note"].append("bench/peers.sh failed: see above")
    for text in found["note"]:
        report.note(text)
    tools.root = found.get("root", "")
    inside = ["chroot", tools.root] if tools.root else []
    if path := found.get("testpmd"):
        tools.testpmd = [path]
    elif name := found.get("testpmd_in_root"):
        tools.testpmd = [*inside, name]
    tools.cloud_net = found.get("cloud_net", "")
    if tools.cloud_net:
        tools.versions["cloud-hypervisor"] = first_line([tools.cloud_net, "--version"])
    if found.get("qsd"):
        tools.qsd = [*inside, found["qsd"]]
        tools.versions["storage daemon"] = first_line([*tools.qsd, "--version"])
    else:
        report.note("no qemu-storage-daemon: its columns are left out, and targets against it are not measured")
    if found.get("fio"):
        fio = [*inside, found["fio"]]
        tools.versions["fio"] = first_line([*fio, "--version"])
        if first_line([*fio, "--enghelp=libblkio"]):
            tools.fio_blkio = fio
        if first_line([*fio, "--enghelp=io_uring"]):
            tools.fio_file = fio
    if {"nbd", "nbd-server"} & set(o.only):
        find_nbd(tools, found.get("nbdkit", ""))
    if not tools.fio_file:
        report.note("no fio with io_uring: the host's own figures are left out, and targets against them are not measured")
    if o.client == "vshunt-bench":
        tools.fio_blkio = []
    elif not tools.fio_blkio:
        report.note("no fio with libblkio: sockets are loaded by our own vshunt-bench")
    if o.wait == "loop" and not tools.fio_blkio:
        sys.exit("bench: --wait loop needs a fio with libblkio as the client")
    if o.spdk:
        find_spdk(o, tools)
    if not tools.fio_blkio and not tools.bench:
        sys.exit("bench: neither a fio with libblkio nor vshunt-bench is there: nothing can load a socket")
    return tools, found.get("work") or os.path.join(TOP, "target", "bench")


def find_nbd(tools, nbdkit):
    """nbdkit, nbdcopy, and a fio with libnbd: that of the chroot has none, but the host's may have it."""
    if nbdkit:
        tools.nbdkit = nbdkit
        tools.versions["nbdkit"] = first_line([nbdkit, "--version"])
    if nbdcopy := shutil.which("nbdcopy"):
        tools.nbdcopy = nbdcopy
        tools.versions["nbdcopy"] = first_line([nbdcopy, "--version"])
    if (fio := shutil.which("fio")) and first_line([fio, "--enghelp=nbd"]):
        tools.fio_nbd = [fio]


def find_spdk(o, tools):
    try:
        tools.spdk, tools.versions["SPDK"] = spdk.find(o.spdk, tools.root)
        tools.spdk_mask = o.spdk_mask
        if o.client == "bdevperf":
            tools.bdevperf, _ = spdk.find(o.spdk, tools.root, spdk.BDEVPERF)
    except spdk.NotFound as e:
        sys.exit(f"bench: --spdk (VSHUNT_SPDK): {e}")


def header(o, b, report):
    m = machine()
    report.line(f"machine    {m['cpu']}, {m['cpus']} CPUs, {m['memory_gib']} GiB, {m['kernel']}")
    for name, version in b.tools.versions.items():
        report.line(f"{name:<10} {version}" if len(name) <= 10 else f"{name} {version}")
    waits = "polling for completions" if o.wait == "loop" else "waiting in the kernel"
    fio = f"fio, libblkio, {waits}" if b.tools.fio_blkio else "vshunt-bench"
    report.line(f"client     {'bdevperf, polling for completions' if b.tools.bdevperf else fio}")
    placed = f"servers on CPUs {b.server_cpus}, clients on {b.client_cpus}, the host's fio on all" if b.pinned else "where the kernel likes"
    held = "held at 0 in every run" if o.awake else "as it is" + (", but held at 0 in rows that say awake" if cases.can_be_awake() else "")
    report.line(f"condition  the same for all: placed {placed}; cpu_dma_latency {held}")
    report.line(f"runs       {o.reps} of {o.time} s each, a fresh server for each, contestants in turn; job = random read|write:depth:queues")
    if o.pin and not b.pinned:
        report.note("--pin: only one CPU here: nothing is pinned")
    if m["load"] > 0.5:
        report.note(f"the machine was not quiet: load {m['load']:.2f} at the start")
    if o.quick:
        report.note("--quick: this shows that it works; the figures mean little")
    report.data.update(machine=m, versions=b.tools.versions, options={k: v for k, v in vars(o).items() if k != "results"})


def clear(folder):
    """What an earlier bench left that was killed; ours is the only one running (the lock)."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.startswith(PREFIX):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def shm_folder():
    """A tmpfs with room for the image, or None."""
    if cases.file_system("/dev/shm") != "tmpfs" or not os.access("/dev/shm", os.W_OK):
        return None
    stat = os.statvfs("/dev/shm")
    return "/dev/shm" if stat.f_bavail * stat.f_frsize >= SHM_BYTES_MIN else None


def main():
    o = arguments()
    # Both end the run through the `finally`s: servers end, images go.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    report = Report()
    tools, work = find_tools(o, report)
    os.makedirs(work, exist_ok=True)
    o.results = os.path.join(os.path.dirname(work.rstrip("/")), "results")
    os.makedirs(o.results, exist_ok=True)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(open(os.path.join(work, "bench.lock"), "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"bench: another one is running (it holds {lock.name}); two would spoil each other's figures")
        shm = shm_folder()
        clear(work)
        if shm:
            clear(shm)
            shm = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=shm))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=work))
        b = cases.Bench(o, tools, folder, shm, report)
        header(o, b, report)
        for name, case in (CASES | EXTRA).items():
            if name in o.only:
                case(b)
    report.summary()
    report.line(f"  {(time.monotonic() - started) / 60:.1f} minutes")
    if o.json:
        with open(o.json, "w") as f:
            json.dump(report.data, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
