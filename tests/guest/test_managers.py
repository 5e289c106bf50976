"""Tests what docs/guide/managers.md gives to QEMU: a guest starts with it, and writes to its disk.

The managers themselves are not here. Each test starts QEMU with the part of a command line that the manager makes, and then with
what the page adds to it.
"""

import re
import shlex

import pytest
import rig as r
import vm

PAGE = r.ROOT / "docs/guide/managers.md"
SIZE = 64 << 20
MEMORY = 640

JOB = """
say disk $(cat /sys/block/vda/size) $(ls /sys/block/vda/mq | wc -w)
printf written | dd of=/dev/vda bs=1M conv=notrunc,fsync 2>/dev/null && say wrote
"""

# What the manager gives to QEMU about the machine and its memory.
MANAGERS = {
    "Incus": [
        *("-machine", "q35", "-m", MEMORY, "-object", f"memory-backend-memfd,id=mem0,size={MEMORY}M,share=on"),
        *("-numa", "node,nodeid=0,memdev=mem0"),
    ],
    "Proxmox VE": ["-machine", "type=q35", "-m", MEMORY],
}


def added(manager, socket, version):
    """The options of QEMU that the page adds for a manager, for this QEMU."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {manager}\n", 1)[1]
    option = re.search(r'(?:raw\.qemu|--args) "([^"]*)"', text)[1]
    # Between double quotes a shell removes the end of a line behind a backslash.
    option = option.replace("\\\n", "").replace("/run/vshunt-kvm/vm0.sock", str(socket)).replace("4096M", f"{MEMORY}M")
    if version < (9, 2):
        r.require("reconnect-ms=1000" in option, option)
        option = option.replace("reconnect-ms=1000", "reconnect=1")
    return shlex.split(option)


class Managed(vm.Guest):
    """A guest that is started with these options, and with a kernel and a console in addition."""

    def __init__(self, rig, program, options):
        folder = vm.image()
        initramfs = rig.dir / "managed.initramfs"
        with open(f"{folder}/initramfs", "rb") as base:
            initramfs.write_bytes(base.read() + vm.archive("job", JOB.encode()))
        self.console = rig.dir / "managed.console"
        argv = [program, "-nodefaults", "-display", "none", "-no-reboot", "-no-user-config"]
        argv += ["-accel", "tcg,thread=multi", "-cpu", "qemu64,-cx16", "-smp", 4, *options]
        argv += ["-kernel", f"{folder}/vmlinuz", "-initrd", initramfs]
        argv += ["-append", "console=ttyS0 panic=-1 quiet oops=panic no_timer_check mitigations=off" + vm.clock()]
        argv += ["-serial", f"file:{self.console}", "-serial", "stdio"]
        self.start(rig, "managed", argv)


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_guest_starts_with_the_options_of_the_page(rig, manager):
    image = rig.image(f"{manager}.img", SIZE)
    daemon, socket = vm.disk_daemon(rig, image, 4, name=manager.split()[0].lower())
    program, version = vm.qemu()
    guest = Managed(rig, program, [*MANAGERS[manager], *added(manager, socket, version)])
    size, queues = guest.expect("disk").split()
    r.require((int(size) * 512, queues) == (SIZE, "4"), f"the guest sees {size} sectors and {queues} queues")
    guest.expect("wrote")
    guest.end()
    r.require(daemon.child.stop() == 0, daemon.child.tail())
    with open(image, "rb") as f:
        r.require(f.read(7) == b"written", "the image does not have what the guest wrote")
