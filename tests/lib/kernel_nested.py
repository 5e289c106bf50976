"""An unmodified QEMU in a VM, with a guest whose disk `vshunt` serves with engine=kernel.

For tests/kernel-relay.
"""

import contextlib
import os
import subprocess
import tempfile

import kernel_vm as k
import rig as r
import vm

# The guests: the arguments of QEMU, and the seconds that the job may take. It takes half a minute
# with the first and two minutes with the second where nothing else runs.
GUESTS = {
    # No kernel: a boot sector on the disk, which copies with the calls of the BIOS. SeaBIOS has a
    # driver of its own.
    "bios": ("-m 64 -object memory-backend-memfd,id=m,size=64M,share=on", 480),
    "linux": (
        "-m 192 -object memory-backend-memfd,id=m,size=192M,share=on -kernel /mnt/vmlinux -initrd /mnt/initramfs "
        '-append "console=ttyS0 panic=-1 nokaslr tsc=reliable no_timer_check mitigations=off acpi=off lsm= audit=0 nowatchdog"',
        900,
    ),
}

# In the VM, the QEMU of this machine boots a guest. It has this machine's files by virtiofs. The
# guest copies the second MiB of its disk to the fifth.
JOB = """
need brd rd_nr=1 rd_size=65536
need vhost_blk
export VSHUNT_CONTROL=/tmp/control
dd if=/dev/urandom of=/tmp/pattern bs=64k count=16 2>/dev/null
dd if=/tmp/pattern of=/dev/ram0 bs=64k seek=16 2>/dev/null
[ ! -e /inner/boot ] || dd if=/inner/boot of=/dev/ram0 2>/dev/null
vshunt serve -q --disk name=d0,file=/dev/ram0 \\
    --export type=vhost-user-blk,name=e0,disk=d0,socket=/tmp/s,queues=1,engine=kernel &
daemon=$!
mount -t virtiofs host /host -o ro || echo "not ok nested: no virtiofs"
mount -t proc proc /host/proc
mount --bind /dev /host/dev
mount --bind /tmp /host/tmp
mount --bind /inner /host/mnt
until [ -S /tmp/s ]; do sleep 0.1; done
# All of it in memory before the clock runs.
cat /inner/* >/dev/null
chroot /host @QEMU@ -nodefaults -no-user-config -display none -no-reboot -accel tcg,thread=single -cpu qemu64,-cx16 \\
    -smp 1 @GUEST@ -numa node,memdev=m \\
    -chardev socket,id=c,path=/tmp/s -device vhost-user-blk-pci,chardev=c,num-queues=1 -serial stdio \\
    </dev/null >/tmp/inner.out 2>&1 &
inner=$!
n=0
while kill -0 $inner 2>/dev/null && [ $n -lt @SECONDS@ ]; do
    sleep 1
    n=$((n + 1))
    [ $((n % 30)) != 0 ] || echo "after $n s: $(tail -n 1 /tmp/inner.out | cut -c 1-100)"
done
kill -9 $inner 2>/dev/null
wait $inner
tr -d '\\r' </tmp/inner.out | grep -E '^(ok|not ok) '
result "nested: QEMU ended well" grep -q '^inner end' /tmp/inner.out
result "nested: what the guest copied is on the disk" \\
    sh -c 'dd if=/dev/ram0 bs=64k skip=64 count=16 2>/dev/null | cmp - /tmp/pattern'
grep -q '^inner end' /tmp/inner.out || tail -n 12 /tmp/inner.out
requests=$(vshunt status --json | tr ',' '\\n' | sed -n 's/.*"requests": *//p' | head -n 1)
result "nested: the kernel served it" sh -c "[ ${requests:-0} -gt 10 ] || { echo requests: $requests; false; }"
vshunt quit
wait $daemon
umount /host/mnt /host/tmp /host/dev /host/proc /host
"""

INNER = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
exec </dev/console >/dev/console 2>&1
@LOAD@
n=0
while [ ! -b /dev/vda ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n + 1)); done
[ -b /dev/vda ] && echo "ok nested: the guest has its disk" || echo "not ok nested: the guest has no disk"
dd if=/dev/vda of=/pattern bs=64k skip=16 count=16 2>/dev/null
dd if=/pattern of=/dev/vda bs=64k seek=64 conv=fsync 2>/dev/null && echo "ok nested: the guest wrote and flushed" \\
    || echo "not ok nested: the guest cannot write"
echo "inner end"
# Without ACPI, whose tables take half of the boot to read, it cannot power off; this QEMU ends with
# a reset.
reboot -f
"""

# Copies 1 MiB, 64 sectors at a time, with the extended read and write of INT 13h (Enhanced Disk
# Drive Specification), says how that went on the first serial port, and resets the machine.
BOOT_SECTOR = """
        .code16
        .globl _start
_start: xorw %ax, %ax
        movw %ax, %ds
        movw %ax, %ss
        movw $0x7c00, %sp
        movb %dl, drive
        movw $32, %cx
again:  pushw %cx
        movb $0x42, %ah
        movw $source, %si
        movb drive, %dl
        int $0x13
        jc failed
        movw $0x4300, %ax
        movw $target, %si
        movb drive, %dl
        int $0x13
        jc failed
        addl $64, source + 8
        addl $64, target + 8
        popw %cx
        loop again
        movw $well, %si
        jmp say
failed: movw $badly, %si
say:    lodsb
        testb %al, %al
        jz end
        movw $0x3f8, %dx
        outb %al, %dx
        jmp say
end:    movb $0xfe, %al
        outb %al, $0x64
        hlt
        jmp end
drive:  .byte 0
# Sectors, the buffer's offset and segment, the first sector.
source: .byte 16, 0
        .word 64, 0, 0x1000
        .quad 2048
target: .byte 16, 0
        .word 64, 0, 0x1000
        .quad 8192
well:   .asciz "\\nok nested: the BIOS read and wrote\\ninner end\\n"
badly:  .asciz "\\nnot ok nested: a call of the BIOS failed\\n"
        .org 510
        .word 0xaa55
"""


def boot_sector(rig):
    """The sector that the BIOS starts."""
    source, made, linked = (rig.dir / f"boot.{kind}" for kind in ("s", "o", "bin"))
    source.write_text(BOOT_SECTOR)
    r.run([r.tool("as", "binutils"), "--32", "-o", made, source])
    r.run([r.tool("ld", "binutils"), "-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary", "-o", linked, made])
    sector = linked.read_bytes()
    r.require(len(sector) == 512, f"the boot sector has {len(sector)} bytes")
    return [("inner", 0o040755, b""), ("inner/boot", 0o100644, sector)]


def vmlinux(folder):
    """The kernel as an ELF file: what unpacks a compressed one takes minutes in a VM within a VM."""
    with open(f"{folder}/vmlinuz", "rb") as f:
        data = f.read()
    for magic, program, package in ((b"\x28\xb5\x2f\xfd", "zstd", "zstd"), (b"\xfd7zXZ\0", "xz", "xz-utils")):
        at = data.find(magic)
        if at < 0:
            continue
        # What follows the packed kernel is no archive, which the program says.
        done = subprocess.run([r.tool(program, package), "-dcq"], input=data[at:], capture_output=True, timeout=60)
        if done.stdout[:4] == b"\x7fELF":
            return done.stdout
    raise r.Skipped("the kernel is packed in a way that is not known here")


def inner_entries(folder, modules):
    """The files that the inner guest boots, as files of the outer guest."""
    names = [*modules.order["virtio_blk"], "virtio_blk"]
    load = "\n".join(f"insmod /modules/{name}.ko" for name in names)
    entries = [(name, 0o040755, b"") for name in ("bin", "dev", "proc", "sys", "modules")]
    entries += [("init", 0o100755, INNER.replace("@LOAD@", load).encode())]
    entries += [("bin/busybox", 0o100755, k.static(r.tool("busybox", "busybox-static"), "busybox-static"))]
    entries += [(f"modules/{name}.ko", 0o100644, modules.data[name]) for name in names]
    return [
        ("inner", 0o040755, b""),
        ("inner/vmlinux", 0o100644, vmlinux(folder)),
        ("inner/initramfs", 0o100644, vm.cpio(entries)),
    ]


def virtiofsd():
    """Shares this machine's files, all of them; the one of QEMU 7 or the one that came after it."""
    if os.geteuid() != 0:
        raise r.Skipped("sharing files with the VM needs root")
    for path, arguments in (
        ("/usr/libexec/virtiofsd", ["--shared-dir=/", "--cache=always", "--sandbox=chroot"]),
        ("/usr/lib/qemu/virtiofsd", ["-o", "source=/", "-o", "cache=always", "-o", "sandbox=chroot"]),
    ):
        if os.access(path, os.X_OK):
            return [path, *arguments]
    raise r.Skipped("virtiofsd is missing (Debian package qemu-system-common or virtiofsd)")


def run(rig, make_base, folder, modules, guest, record):
    """Runs the VM with one of the guests."""
    qemu, _ = vm.qemu()
    if not modules.add("virtio_blk"):
        raise r.Skipped("the kernel has no module virtio_blk")
    base = make_base(inner_entries(folder, modules) if guest == "linux" else boot_sector(rig))
    # Not in the rig's folder: the path of a socket is short.
    socket = f"{tempfile.mkdtemp(dir=rig.dir)}/fs"

    def share():
        """virtiofsd ends with the VM that it served. A VM that starts again needs another one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket)
        r.Child(rig, "virtiofsd", [*virtiofsd(), f"--socket-path={socket}"])
        r.wait_for("virtiofsd listens", lambda: os.path.exists(socket))

    memory = 1536
    arguments, seconds = GUESTS[guest]
    job = JOB.replace("@QEMU@", str(qemu)).replace("@GUEST@", arguments).replace("@SECONDS@", str(seconds))
    more = ["-object", f"memory-backend-memfd,id=memory,size={memory}M,share=on", "-numa", "node,memdev=memory"]
    more += ["-chardev", f"socket,id=fs,path={socket}", "-device", "vhost-user-fs-pci,chardev=fs,tag=host"]
    outer = k.Vm(rig, base, f"nested-{guest}", job, memory_mib=memory, more=more, checks=False, before_start=share)
    outer.finish(seconds + 30, record)
