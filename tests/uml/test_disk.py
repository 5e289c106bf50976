"""Tests a guest under User-mode Linux on a vhost-user disk.

Its front end is an independent driver.

This driver (arch/um/drivers/virtio_uml.c) always sends SET_MEM_TABLE with room for two regions,
and gives a socket as the call descriptor of a queue.
"""

import hashlib
import os
import platform
import subprocess

import rig as r
import vm

SIZE = 16 << 20
# Where the guest writes, and how much, in bytes.
AT, LEN = 4 << 20, 6 << 20

INIT = f"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev
/bin/busybox mount -t devtmpfs dev /dev
exec >/dev/console 2>&1 </dev/null
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
say() {{ echo "@@ $*"; }}
sum() {{ sha256sum "$1" | cut -d' ' -f1; }}
say ready
insmod /virtio_blk.ko || say trouble insmod
say size $(cat /sys/block/vda/size)
say read $(sum /dev/vda)
dd if=/dev/urandom of=/data bs=64k count={LEN >> 16} 2>/dev/null
say wrote $(sum /data)
dd if=/data of=/dev/vda bs=64k seek={AT >> 16} conv=fsync,notrunc 2>/dev/null || say trouble dd
echo 3 >/proc/sys/vm/drop_caches
say again $(dd if=/dev/vda bs=64k skip={AT >> 16} count={LEN >> 16} 2>/dev/null | sha256sum | cut -d' ' -f1)
dmesg | grep -v 'Kernel command line' | grep -E 'I/O error|virtio_uml|vhost.user' | while read -r line; do say trouble "$line"; done
say end
poweroff -f
"""


def initramfs(rig, release):
    """The guest's root: busybox and the driver."""
    busybox = r.tool("busybox", "busybox-static")
    if subprocess.run(["ldd", busybox], capture_output=True).returncode == 0:
        raise r.Skipped("busybox is not static (Debian package busybox-static)")
    driver = f"/usr/lib/uml/modules/{release}/kernel/drivers/block/virtio_blk.ko"
    if not os.path.exists(driver):
        raise r.Skipped(f"{driver} is missing: this User-mode Linux is not Debian's")

    def content(path):
        with open(path, "rb") as file:
            return file.read()

    folders = [(name, 0o40755, b"") for name in ("bin", "dev")]
    files = [("init", INIT.encode()), ("bin/busybox", content(busybox)), ("virtio_blk.ko", content(driver))]
    path = rig.dir / "initramfs"
    path.write_bytes(vm.cpio(folders + [(name, 0o100755, data) for name, data in files]))
    return path


class Guest:
    """User-mode Linux with a disk on a socket."""

    def __init__(self, rig, socket):
        program = r.tool("linux.uml", "user-mode-linux")
        release = r.run([program, "--version"]).stdout.strip()
        argv = [program, "mem=128M", f"initrd={initramfs(rig, release)}"]
        argv += ["root=/dev/ram0", "con=null", "con0=null,fd:1", "ssl=null", "quiet", "panic=-1"]
        argv += [f"uml_dir={rig.dir}/", "umid=guest", f"virtio_uml.device={socket}:2"]
        self.child = r.Child(rig, "uml", argv, start_new_session=True)

    lines, said = vm.Guest.lines, vm.Guest.said

    def end(self):
        """Waits for the guest's end. The test is left out if the guest does not start."""
        code = self.child.wait(vm.BOOT_S)
        if self.said("ready") is None:
            raise r.Skipped(f"User-mode Linux does not start here: {self.child.tail(4)}")
        # The program itself may abort after "System halted".
        r.require(self.said("end"), f"it ended with {code}: {self.child.tail()}")
        r.require(self.said("trouble") is None, self.child.tail())


def test_a_guest_reads_and_writes_its_disk(rig):
    if platform.machine() != "x86_64":
        raise r.Skipped("Debian has User-mode Linux for amd64 only")
    data = bytearray(os.urandom(SIZE))
    image = rig.dir / "disk.img"
    image.write_bytes(data)
    daemon, socket = vm.disk_daemon(rig, image, 1)
    guest = Guest(rig, socket)
    guest.end()
    tail = daemon.child.tail(3)
    r.require(guest.said("size") == str(SIZE >> 9), f"the guest has a disk of {guest.said('size')} sectors: {tail}")
    r.require(guest.said("read") == hashlib.sha256(data).hexdigest(), "the guest read other data than the image has")
    left = image.read_bytes()
    outside = left[:AT] + left[AT + LEN :]
    r.require(outside == data[:AT] + data[AT + LEN :], "the image was changed where the guest did not write")
    written = hashlib.sha256(left[AT : AT + LEN]).hexdigest()
    r.require((guest.said("wrote"), guest.said("again")) == (written, written), "the image has other data than the guest wrote")
    queue = daemon.status()["queues"][0]
    r.require(queue["requests"] > 0 and queue["notifications"] > 0 and queue["errors"] == 0, f"{queue}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
