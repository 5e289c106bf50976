"""Tests the kernel module in VMs, with the programs of kmod/tests and vshunt-bench."""

import os

import kernel_jobs
import kernel_vm as k
import pytest
import rig as r

pytestmark = pytest.mark.timeout(1800)

# Disks that are quick, and some that fail.
MODULES = ("brd", "null_blk", "loop", "scsi_debug", "sd_mod", "dm_mod", "dm_flakey", "dm_delay")
# Jobs that need no program of vshunt, and the seconds that they may take.
VMS = {
    "loading": (kernel_jobs.LOADING, 240),
    "serving": (kernel_jobs.SERVING, 360),
    "living": (kernel_jobs.LIVING, 480),
    "wide": (kernel_jobs.WIDE, 480),
    "lying": (kernel_jobs.LYING, 360),
    "failing": (kernel_jobs.FAILING, 360),
}


@pytest.fixture(scope="module")
def more_modules(modules):
    """Modules for disks, and the module of this tree as if built for another kernel."""
    modules.add("other_kernel", k.of_another_kernel(modules.data["vhost_blk"]))
    for name in MODULES:
        modules.add(name)
    return modules


@pytest.fixture(scope="module")
def base(rig, folder, more_modules):
    """The image that each VM boots, with static programs that are built here."""
    return k.Base(rig, folder, more_modules, {name: k.test_program(name) for name in ("vhost-blk-test", "dm-table")})


def seeded(job):
    return job.replace("@SEED@", os.environ.get("VSHUNT_SEED", "7"))


@pytest.mark.parametrize("name", VMS)
def test_the_module_alone(rig, base, record, name):
    job, seconds = VMS[name]
    k.Vm(rig, base, name, seeded(job)).finish(seconds, record)


def corpus():
    """The inputs that the fuzz targets of crates/virtio kept, as files of the VM; none where the
    targets did not run."""
    found = [p for name in ("rings", "blk_request") for p in sorted((r.ROOT / "fuzz/corpus" / name).glob("*"))]
    # What 10,000 chains use up, and more.
    data = b"".join(p.read_bytes() for p in found)[: 1 << 20]
    return [("corpus", 0o040755, b""), ("corpus/all", 0o100644, data)] if data else []


def test_driven_by_vshunt_bench(rig, folder, more_modules, record):
    inputs = corpus()
    programs_and_inputs = [*k.with_libraries({"vshunt-bench": r.binary("vshunt-bench")}), *inputs]
    base = k.Base(rig, folder, more_modules, {}, programs_and_inputs)
    how = ', of the fuzz corpus" --corpus /corpus' if inputs else '"'
    job = seeded(kernel_jobs.DRIVEN).replace('@CORPUS@"', how)
    k.Vm(rig, base, "driven", job, memory_mib=1280).finish(360, record)
