"""A disk image that boots: what a user of the guides has. It has the kernel of the other test guests (tests/lib/vm.py), busybox,
and a root shell on the first serial port.

The firmware of a VMM starts it like every other disk. Its file system is FAT, without partitions.
"""

import os
import pty
import re
import subprocess
import time
import tty
from pathlib import Path

import rig as r
import vm

# The rest of the image is free.
FILE_SYSTEM_LEN = 64 << 20
BOOT_S = 180.0

INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/bin HOME=/ TERM=dumb PS1=
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
# Twice: which of virtio and virtio_ring comes first depends on the kernel.
for m in /modules/*.ko /modules/*.ko; do insmod "$m" 2>/dev/null; done
echo "@@ guest is up"
stty -echo </dev/ttyS0
poweroff() { /bin/busybox poweroff -f; }
while read -r line; do
    case $line in "") continue ;; esac
    (eval "$line") 2>&1
    echo "@@ status $?"
done </dev/ttyS0
"""
CONFIG = """DEFAULT linux
TIMEOUT 1
LABEL linux
  KERNEL vmlinuz
  INITRD init.img
  APPEND console=ttyS0 quiet panic=-1 no_timer_check mitigations=off
"""


# In front of QEMU, for machines without KVM: QEMU 7.2 emulates cmpxchg16b wrongly there, and
# crashes when the vectors of a vhost-user NIC are unmasked. The pages say so. With a thread for
# each CPU it also crashes at times when one of them writes to a device while another maps one
# (stale section in memory_region_dispatch_write).
QEMU = r"""#!/bin/bash
shopt -s extglob
case " $* " in *" -machine none"* | *" -M none"*) probe=yes ;; *) probe= ;; esac
if [ ! -w /dev/kvm ] && [ -z "$probe" ]; then
    set -- "${@//vectors=+([0-9])/vectors=0}" -cpu qemu64,-cx16
    set -- "${@//\"vectors\":+([0-9])/\"vectors\":0}"
    for argument; do
        if [ "$argument" = tcg ]; then argument=tcg,thread=single; fi
        shift
        set -- "$@" "$argument"
    done
fi
exec /usr/bin/qemu-system-x86_64.real "$@"
"""


def with_qemu(root):
    """Puts QEMU of a root behind a script that knows what this machine lacks."""
    place = root.path / "usr/bin/qemu-system-x86_64"
    place.rename(f"{place}.real")
    place.write_text(QEMU, encoding="ascii")
    place.chmod(0o755)


def initramfs():
    """A cpio archive: busybox, the drivers of the test guests, and the shell on the serial port."""
    busybox = r.tool("busybox", "busybox-static")
    if subprocess.run(["ldd", busybox], capture_output=True).returncode == 0:
        raise r.Skipped("busybox is not static (Debian package busybox-static)")
    folders = [(name, 0o40755, b"") for name in ("bin", "dev", "modules", "proc", "sys", "tmp")]
    files = [("init", 0o100755, INIT.encode()), ("bin/busybox", 0o100755, Path(busybox).read_bytes())]
    files += [(f"modules/{path.name}", 0o100644, path.read_bytes()) for path in sorted(Path(vm.image(), "modules").glob("*.ko"))]
    return vm.cpio(folders + files)


def bootable(rig, path, size_bytes=1 << 30):
    """Makes the image."""
    syslinux, mcopy = r.tool("syslinux", "syslinux"), r.tool("mcopy", "mtools")
    (rig.dir / "init.img").write_bytes(initramfs())
    (rig.dir / "syslinux.cfg").write_text(CONFIG.rstrip("\n") + vm.clock() + "\n", encoding="ascii")
    with open(path, "wb") as image:
        image.truncate(size_bytes)
    # Without partitions. The boot sector of a partition is loaded to the address of the one before
    # it, and TCG does not see that a process other than QEMU has written there: it would execute
    # the instructions that it has translated before.
    r.run([r.tool("mkfs.fat", "dosfstools"), "-F", "16", path, FILE_SYSTEM_LEN >> 10])
    r.run([syslinux, "--install", path])
    r.run([mcopy, "-i", path, f"{vm.image()}/vmlinuz", rig.dir / "init.img", rig.dir / "syslinux.cfg", "::/"])
    return path


def threads(pid):
    """The state, the wait in the kernel and the system call of each thread of a process and of those below it."""
    found = []
    for place in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name, state = re.match(r"\d+ \((.*)\) (\S)", (place / "stat").read_text()).groups()
            found.append(f"{name} {state} {(place / 'wchan').read_text()} {(place / 'syscall').read_text().strip()}")
            found += [thread for child in (place / "children").read_text().split() for thread in threads(child)]
        except OSError:
            continue  # it ended
    return found


class Console:
    """The shell of a guest, at the other end of a program that shows a serial port on its terminal: a VMM, `virsh console`."""

    def __init__(self, rig, argv, place):
        self.place = place
        self.at = 0
        self.port, terminal = pty.openpty()
        tty.setraw(terminal)
        self.child = r.Child(rig, f"console-{len(rig.children)}", argv, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        self.text = ""
        os.set_blocking(self.port, False)

    def up(self):
        """Waits until the shell answers, whether it has done so before or not."""
        token = [0]

        def answers():
            token[0] += 1
            self._write(f"echo @@ sync {token[0]}\n")
            time.sleep(0.5)
            r.require(self.child.running(), f"{self.place}: it ended: {self._read()[-600:]}")
            return re.search(r"@@ sync \d+\s+@@ status 0", self._read())

        try:
            r.wait_for(f"{self.place}: the guest has a shell", answers, BOOT_S)
        except r.Failed as e:
            raise r.Failed(f"{e}: {self.text[-600:]}") from e
        # What was written while it booted is answered late.
        r.wait_for("the last answer", lambda: re.search(rf"@@ sync {token[0]}\s+@@ status 0\s", self._read()))
        self.at = len(self.text)

    def run(self, lines):
        """Runs lines of a page. -> status of the last line, and the whole output; it ends with a line that fails"""
        said = ""
        for line in lines.splitlines():
            self._write(f"{line}\n")
            if line.strip() == "poweroff":
                r.wait_for("the guest is off", lambda: not self.child.running())
                return 0, said
            text = self._until(r"@@ status (\d+)\s")
            said += text.split("@@ status")[0].replace("\r", "")
            status = int(re.search(r"@@ status (\d+)", text)[1])
            if status:
                return status, said
        return 0, said

    def _until(self, regex):
        """What came up to the first match of `regex`, after the one before."""

        def look():
            found = re.search(regex, self._read()[self.at :])
            r.require(found or self.child.running(), f"{self.place}: the guest ended: {self.text[-600:]}")
            return found

        try:
            end = self.at + r.wait_for(f"{self.place}: the guest answers", look, every_s=0.1).end()
        except r.Failed as e:
            raise r.Failed(f"{e}: {self.text[-600:]}{self._hangs()}") from e
        text, self.at = self.text[self.at : end], end
        return text

    def _hangs(self):
        """What can be seen of a guest that does not answer: whether its shell still waits for the end of a line, and where the threads
        of the VMM are.
        """
        said, where = len(self.text), threads(self.child.pid)
        self._write("\n")
        time.sleep(5)
        return f" | after an end of line: {self._read()[said:]!r} | {where}"

    def _write(self, text):
        os.write(self.port, text.encode())

    def _read(self):
        try:
            while data := os.read(self.port, 65536):
                self.text += data.decode(errors="replace")
        except OSError:
            pass  # there is nothing, or the program has ended
        return self.text
