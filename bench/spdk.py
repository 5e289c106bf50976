"""SPDK as a peer: `vhost` of a build tree that the user has, with one block device and no huge pages; and `bdevperf` as a client.

Called by run.py (`find`), the load cases (`argv`) and client.py (`bdevperf`). The server polls the CPUs of its mask from its start to its
end, whether there is load or not.
"""
import json
import os
import re
import subprocess

NAME = "SPDK"
BLOCK_BYTES = 512
NULL_BYTES = 4 << 30
# The targets, of its IOPS: at depth 1, and at the others.
FIRST_MIN, MIN = 0.9, 0.95
# Part of the memory of SPDK.
MALLOC_BYTES = 256 << 20
# The name of the socket in the bench's folder, which is the controller's name.
SOCK = "s"
# DPDK's memory without huge pages, MiB. vhost does not start with 320.
MEMORY_MIB = 1024
CLIENT_MEMORY_MIB = 512
VHOST, BDEVPERF = "bin/vhost", "examples/bdevperf"


class NotFound(Exception):
    """Why the build tree cannot be used."""


def cpus(mask):
    """The numbers of the CPUs of a mask."""
    return [n for n in range(mask.bit_length()) if mask >> n & 1]


def program(folder, name=VHOST):
    return os.path.join(os.path.abspath(folder), "build", name)


def refused(folder, mask, client):
    """Why these options are wrong, or None."""
    here = os.sched_getaffinity(0)
    for name in (VHOST, BDEVPERF) if client == "bdevperf" else (VHOST,):
        if not os.access(program(folder, name), os.X_OK):
            return f"--spdk (VSHUNT_SPDK): no program {program(folder, name)}; name the folder where SPDK is built"
    if not mask or not set(cpus(mask)) <= here:
        return f"--spdk-mask {mask:#x}: name one CPU or more of {','.join(map(str, sorted(here)))}, such as 0x{1 << min(here):x}"
    return None


def find(folder, root, name=VHOST):
    """-> (the beginning of a program's argv, its version): on the host, or in the chroot `root` ('': none) if only that has its
    libraries. The folder has the same path on both sides."""
    path = program(folder, name)
    why = ""
    for inside in ([], ["chroot", root]) if root else ([],):
        try:
            done = subprocess.run([*inside, path, "--version"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as e:
            why = str(e)
            continue
        if done.returncode == 0:
            return [*inside, path], (done.stdout.splitlines() or ["no version"])[0]
        why = (done.stderr + done.stdout).strip() or f"exit status {done.returncode}"
    raise NotFound(f"{path} does not run: {why[-300:]}")


def argv(b, kind, path):
    """A server's argv, after it wrote its configuration. `kind` is null, malloc, aio or uring, the latter two for the file `path`. SPDK
    offers as many queues as a front end wants."""
    device = {"name": "d", "block_size": BLOCK_BYTES}
    sizes = {"null": NULL_BYTES, "malloc": MALLOC_BYTES}
    device |= {"num_blocks": sizes[kind] // BLOCK_BYTES} if kind in sizes else {"filename": path}
    mask = f"{b.o.spdk_mask:#x}"
    config = {"subsystems": [
        {"subsystem": "bdev", "config": [{"method": f"bdev_{kind}_create", "params": device}]},
        {"subsystem": "vhost_blk", "config": [{"method": "vhost_create_blk_controller",
                                               "params": {"ctrlr": SOCK, "dev_name": "d", "cpumask": mask}}]}]}
    file = os.path.join(b.work, "spdk.json")
    with open(file, "w") as f:
        json.dump(config, f)
    return [*b.tools.spdk, "-m", mask, "--no-huge", "-s", str(MEMORY_MIB), "--no-pci", "-S", b.work, "-r", "{sock}.rpc", "-c", file]


def bdevperf(program_argv, sock, rw, job, queue_size, time_s, polled):
    """bdevperf's argv, after its configuration is written beside the socket. A queue for each of the CPUs `polled`."""
    config = {"subsystems": [{"subsystem": "bdev", "config": [{"method": "bdev_virtio_attach_controller", "params": {
        "name": "V", "trtype": "user", "traddr": sock, "dev_type": "blk", "vq_count": len(polled), "vq_size": queue_size}}]}]}
    file = f"{sock}.bdevperf.json"
    with open(file, "w") as f:
        json.dump(config, f)
    mask = sum(1 << cpu for cpu in polled)
    return [*program_argv, "-m", f"{mask:#x}", "--no-huge", "-s", str(CLIENT_MEMORY_MIB), "--no-pci", "-r", f"{sock}.bdevperf.rpc",
            "-c", file, "-q", str(job.depth), "-o", job.bs, "-w", rw, "-t", str(time_s), "-C", "-l"]


def bdevperf_result(text, time_s):
    """What bdevperf printed -> {'iops', 'ios', 'p50_us', 'p99_us'}, or None if I/O failed. The percentiles are those of its slowest queue."""
    total = re.search(r"Total\s*:\s+([\d.]+)\s+[\d.]+\s+([\d.]+)", text)
    if not total or float(total[2]):
        return None
    slowest = {p: max(map(float, re.findall(rf"\b{p}\.00000% :\s+([\d.]+)us", text)), default=0.0) for p in (50, 99)}
    iops = float(total[1])
    return {"iops": iops, "ios": round(iops * time_s), "p50_us": slowest[50], "p99_us": slowest[99]}
