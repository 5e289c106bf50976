"""Tests the first use: `vshunt serve FILE`, and the line for QEMU that it prints.

A real guest boots with that line, and writes to the disk.
"""

import os
import shlex
import subprocess
import time

import as_user
import pytest
import rig as r
import vm

SIZE = 64 << 20

JOB = """
say disk $(cat /sys/block/vda/size) $(ls /sys/block/vda/mq | wc -w) $(nproc) $(cat /sys/block/vda/serial)
printf written | dd of=/dev/vda bs=1M conv=notrunc,fsync 2>/dev/null && say wrote
"""


class Pasted(vm.Guest):
    """A guest that is started by `line`, with a kernel and a console in addition."""

    def __init__(self, rig, line, job):
        folder = vm.image()
        vm.qemu()
        initramfs = rig.dir / "pasted.initramfs"
        initramfs.write_bytes(open(f"{folder}/initramfs", "rb").read() + vm.archive("job", job.encode()))
        self.console = rig.dir / "pasted.console"
        more = ["-cpu", "qemu64,-cx16", "-nodefaults", "-display", "none", "-no-reboot", "-no-user-config"]
        more += ["-kernel", f"{folder}/vmlinuz", "-initrd", initramfs]
        more += ["-append", "console=ttyS0 panic=-1 quiet oops=panic no_timer_check mitigations=off" + vm.clock()]
        more += ["-serial", f"file:{self.console}", "-serial", "stdio"]
        self.start(rig, "pasted", [*shlex.split(line), *more])


def qemu_line(text):
    """The command for QEMU in the output of `vshunt serve`."""
    lines = text.split("QEMU:\n", 1)[1].splitlines()
    last = next(at for at, line in enumerate(lines) if not line.endswith("\\"))
    line = " ".join(line.rstrip("\\") for line in lines[: last + 1])
    # All guests of the tests run under TCG: KVM may be there and not work inside of another guest.
    r.require("-accel kvm -accel tcg " in line, line)
    return line.replace("-accel kvm -accel tcg ", "-accel tcg,thread=multi ")


@pytest.fixture
def home(rig):
    """A folder of the user who runs the daemon: not root, since root has /run, which belongs to the machine."""
    if os.geteuid() != 0:
        yield rig.dir
        return
    with as_user.folder(rig, "home") as folder:
        yield folder


def test_a_guest_boots_with_the_line_that_is_printed(rig, home):
    start = time.monotonic()
    image = rig.image("first disk.img", SIZE, home)
    run = home / "run"
    run.mkdir(mode=0o700)
    user, program = {}, r.binary("vshunt")
    if os.geteuid() == 0:
        for path in (image, run):
            os.chown(path, as_user.NOBODY, as_user.NOBODY)
        user = {"user": as_user.NOBODY, "group": as_user.NOBODY, "extra_groups": []}
        program = as_user.program(home)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(run)}
    env.pop("VSHUNT_CONTROL", None)
    lines = rig.dir / "lines"
    with open(lines, "wb") as stdout:
        child = r.Child(rig, "vshunt", [program, "serve", image.name], cwd=home, env=env, stdout=stdout, **user)
    r.wait_for("the daemon serves", lambda: "Cloud Hypervisor" in r.whole_lines(lines) or not child.running())
    r.require(child.running(), child.tail())
    guest = Pasted(rig, qemu_line(r.whole_lines(lines)), JOB)
    size, queues, cpus, serial = guest.expect("disk").split()
    r.require((int(size) * 512, serial) == (SIZE, "firstdisk"), f"the guest sees {size} sectors and serial {serial}")
    r.require(queues == cpus, f"the guest has {cpus} CPUs, and {queues} queues")
    guest.expect("wrote")
    guest.end()
    print(f"from the image to the guest's end: {time.monotonic() - start:.1f} s")
    status = subprocess.run([program, "status"], env=env, capture_output=True, text=True, check=False, **user)
    r.require("-255 stopped" in status.stdout, f"status: {status.stdout}{status.stderr}")
    r.require(child.stop() == 0, child.tail())
    with open(image, "rb") as f:
        r.require(f.read(7) == b"written", "the image does not have what the guest wrote")
