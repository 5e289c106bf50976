"""Tests `vshunt serve … engine=kernel` in VMs: choice of the engine, load, moves, kills.

It also runs the tests of the device with this engine, and a QEMU in a VM with a guest whose disk
the engine serves.
"""

import kernel_nested
import kernel_relay
import kernel_vm as k
import pytest
import rig as r

pytestmark = pytest.mark.timeout(1800)

MODULES = ("brd", "null_blk", "loop", "dm_mod", "dm_delay")
# Jobs, and the seconds that they may take.
VMS = {"choosing": (kernel_relay.CHOOSING, 240), "disk": (kernel_relay.DISK, 480), "ends": (kernel_relay.ENDS, 480)}

DEVICE_TESTS = ("config", "dirty_log", "hostile", "layout", "memory", "protocol", "requests", "workers")
# What the kernel's engine does not have, or does its own way.
DEVICE_SKIPPED = {
    "packed rings": ("a_packed_chain_without_end",),
    "a write cache that the guest switches off": ("switched_off_cache", "write_cache_is_switched", "every_cache_mode"),
    "more than 64 queues": ("as_many_queues_as_can_be",),
    "null disks": ("chains_longer_than_seg_max_on_null_disks",),
    "thin images": ("in_a_thin_image", "only_what_outlives_us", "chains_longer_than_seg_max_on_thin_disks"),
    # As vhost's core has it: a chain that cannot be translated breaks the ring, and the reason has
    # one wording.
    "answers to chains that lie about addresses": (
        "bad_chains_are_answered",
        "buffer_across_adjoining_regions",
        "the_same_head_twice",
        "head_outside_of_the_table",
        "available_index_that_jumps",
        "full_error_descriptor",
    ),
    # It takes what Linux guests send, several ranges of any size; where they are not offered the
    # type is unknown.
    "limits of DISCARD and WRITE_ZEROES": ("discard_and_write_zeroes_refused", "more_than_the_maximum", "a_read_only_export"),
    "workers of this process": (
        "a_worker_is_made_used_and_freed",
        "attach_to_what_is_not_there",
        "queues_move_under_full_load",
        "stopped_queues_move_too",
    ),
}


@pytest.fixture(scope="module")
def folder():
    """The folder of the stock kernel."""
    return k.kernel("fetch")


@pytest.fixture(scope="module")
def modules(folder):
    """The kernel's modules, and the module of this tree, which is built."""
    made = k.Modules(folder)
    made.add_ours()
    for name in MODULES:
        made.add(name)
    return made


@pytest.fixture(scope="module")
def make_base(rig, folder, modules):
    """Makes what VMs boot, with vshunt and vshunt-bench. Call it with more files, or with more
    programs as name: path."""
    tools = {"dm-table": k.test_program("dm-table")}
    ours = {name: r.binary(name) for name in ("vshunt", "vshunt-bench")}

    def make(more=(), programs=()):
        return k.Base(rig, folder, modules, tools, [*k.with_libraries({**ours, **dict(programs)}), *more])

    return make


@pytest.fixture(scope="module")
def base(make_base):
    return make_base()


@pytest.mark.parametrize("name", VMS)
def test_vm(rig, base, record, name, pytestconfig):
    (job, seconds), kills = VMS[name], pytestconfig.getoption("--kills") or 4
    k.Vm(rig, base, name, kernel_relay.of_kills(job, kills), memory_mib=1024).finish(seconds, record)


def test_the_tests_of_the_device(rig, make_base, record):
    stripped = rig.dir / "device-test"
    r.run([r.tool("strip", "binutils"), "-g", "-o", stripped, r.test_binary("device")])
    skipped = [f"--skip={name}" for names in DEVICE_SKIPPED.values() for name in names]
    job = kernel_relay.DEVICE.replace("@WHICH@", " ".join([*DEVICE_TESTS, *skipped]))
    k.Vm(rig, make_base(programs={"device-test": str(stripped)}), "device", job, memory_mib=1536).finish(600, record)


@pytest.mark.parametrize("guest", ("bios", pytest.param("linux", marks=pytest.mark.long)))
def test_a_vm_in_the_vm(rig, make_base, folder, modules, record, guest):
    kernel_nested.run(rig, make_base, folder, modules, guest, record)
