"""SPDK's vhost as a peer: `vhost` of a build tree that the user has, one block device, no huge pages.

Called by run.py (`find`) and the load cases (`argv`). The server polls the CPUs of its mask from its start to its
end, whether there is load or not.
"""
import json
import os
import subprocess

NAME = "SPDK"
BLOCK_BYTES = 512
NULL_BYTES = 4 << 30
# The name of the socket in the bench's folder, which is the controller's name.
SOCK = "s"
# DPDK's memory without huge pages, MiB. It does not start with 320.
MEMORY_MIB = 1024


class NotFound(Exception):
    """Why the build tree cannot be used."""


def cpus(mask):
    """The numbers of the CPUs of a mask."""
    return [n for n in range(mask.bit_length()) if mask >> n & 1]


def program(folder):
    return os.path.join(os.path.abspath(folder), "build", "bin", "vhost")


def refused(folder, mask):
    """Why these options are wrong, or None."""
    here = os.sched_getaffinity(0)
    if not os.access(program(folder), os.X_OK):
        return f"--spdk (VSHUNT_SPDK): no program {program(folder)}; name the folder where SPDK is built"
    if not mask or not set(cpus(mask)) <= here:
        return f"--spdk-mask {mask:#x}: name one CPU or more of {','.join(map(str, sorted(here)))}, such as 0x{1 << min(here):x}"
    return None


def find(folder, root):
    """-> (the beginning of vhost's argv, its version): on the host, or in the chroot `root` ('': none) if only that has its
    libraries. The folder has the same path on both sides."""
    why = ""
    for inside in ([], ["chroot", root]) if root else ([],):
        try:
            done = subprocess.run([*inside, program(folder), "--version"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired) as e:
            why = str(e)
            continue
        if done.returncode == 0:
            return [*inside, program(folder)], (done.stdout.splitlines() or ["no version"])[0]
        why = (done.stderr + done.stdout).strip() or f"exit status {done.returncode}"
    raise NotFound(f"{program(folder)} does not run: {why[-300:]}")


def argv(b, kind, path):
    """A server's argv, after it wrote its configuration. `kind` is null, aio or uring, the latter two for the file `path`. SPDK
    offers as many queues as a front end wants."""
    device = {"name": "d", "block_size": BLOCK_BYTES}
    device |= {"num_blocks": NULL_BYTES // BLOCK_BYTES} if kind == "null" else {"filename": path}
    mask = f"{b.o.spdk_mask:#x}"
    config = {"subsystems": [
        {"subsystem": "bdev", "config": [{"method": f"bdev_{kind}_create", "params": device}]},
        {"subsystem": "vhost_blk", "config": [{"method": "vhost_create_blk_controller",
                                               "params": {"ctrlr": SOCK, "dev_name": "d", "cpumask": mask}}]}]}
    file = os.path.join(b.work, "spdk.json")
    with open(file, "w") as f:
        json.dump(config, f)
    return [*b.tools.spdk, "-m", mask, "--no-huge", "-s", str(MEMORY_MIB), "--no-pci", "-S", b.work, "-r", "{sock}.rpc", "-c", file]
