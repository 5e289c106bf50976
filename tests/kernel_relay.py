"""`vshunt serve … engine=kernel` in a VM: driven over the socket, moved, killed; and an unmodified QEMU with a guest on it."""

import os
import subprocess
import tempfile

import kernel_jobs
import kernel_vm as k
import rig as r
import vm

RELAY = (
    kernel_jobs.PINNED
    + """
need brd rd_nr=1 rd_size=131072
export VSHUNT_CONTROL=/tmp/control
# serve DISK ARGUMENT...: a daemon with one export of four queues; more for the export.
serve() {
    file=$1
    shift
    vshunt serve -q --disk name=d0,file=$file "$@" &
    daemon=$!
    n=0
    until vshunt status >/dev/null 2>&1; do
        n=$((n + 1))
        [ $n -lt 100 ] && kill -0 $daemon || { echo "not ok relay: the daemon does not come up"; return 1; }
        sleep 0.1
    done
}
# Not below `result`, whose command is in a shell of its own: only the parent can wait.
ended() {
    vshunt quit
    wait $daemon
    rc=$?
    result "relay: $1 ends" [ $rc = 0 ]
}
load() { vshunt-bench blk --quiet --socket /tmp/s --verify --rw randrw "$@"; }
engine() { vshunt status --json | grep -q "\\"engine\\": *\\"$1\\""; }
export=type=vhost-user-blk,name=e0,disk=d0,socket=/tmp/s,queues=4

serve /dev/ram0 --export $export,engine=auto
result "relay: without the module engine=auto is ours" engine user
result "relay: and says why" sh -c "vshunt status --json | grep engine-why"
ended "a daemon without the module"
result "relay: without the module engine=kernel is refused" \\
    fails "modprobe vhost_blk" timeout 10 vshunt serve --disk name=d0,file=/dev/ram0 --export $export,engine=kernel

need vhost_blk
serve /dev/ram0 --export $export,engine=auto
result "relay: with the module engine=auto is the kernel" engine kernel
ended "a daemon that had no front-end"

serve /dev/ram0 --export $export,engine=kernel,workers=2
result "relay: the engine is the kernel" engine kernel
result "relay: verified load over the socket" load --queues 4 --runtime 3s
# Moved, and workers made and freed, while I/O runs.
load --queues 4 --runtime 6s >/tmp/load.out 2>&1 &
bench=$!
moves() {
    sleep 1
    for turn in 1 2 3 4 5 6; do
        w=$(vshunt worker new --kind kernel --export e0) || return 1
        vshunt worker list | grep -q kernel || { echo "no kernel worker is listed"; return 1; }
        vshunt attach e0:$((turn % 4)) $w || return 1
        fails "" vshunt worker free $w || return 1
        vshunt attach e0:$((turn % 4)) $old || return 1
        vshunt worker free $w || return 1
    done
}
# A worker of the kernel that is there already.
old=$(vshunt worker list | awk '/kernel/ { print $1; exit }')
result "relay: workers of the kernel made, attached, freed under load" moves
wait $bench
rc=$?
result "relay: and the load held" sh -c "[ $rc = 0 ] || { cat /tmp/load.out; false; }"
ended "a daemon with workers of the kernel"
result "relay: nothing is pinned" none_pinned

# Killed under load, three times.
turn=0
while [ $turn -lt 3 ]; do
    serve /dev/ram0 --export $export,engine=kernel,workers=per-queue || break
    load --queues 4 --runtime 20s --timeout 1s >/dev/null 2>&1 &
    bench=$!
    sleep 1.5
    kill -0 $bench || echo "not ok relay: the load ended before the daemon was killed"
    kill -9 $daemon
    wait $daemon 2>/dev/null
    kill -9 $bench 2>/dev/null
    wait $bench 2>/dev/null
    rm -f /tmp/s /tmp/control
    turn=$((turn + 1))
done
result "relay: killed under load, nothing is pinned" none_pinned

# A raw file, by way of a loop device.
need loop
truncate -s 64M /tmp/disk.img
serve /tmp/disk.img --export $export,engine=kernel
result "relay: a raw file: the engine is the kernel" engine kernel
result "relay: a raw file: verified load" load --queues 2 --runtime 2s
ended "a daemon with a loop device"
result "relay: the loop device is gone" sh -c '! losetup -a | grep disk.img'
result "relay: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""
)

# In the VM an unmodified QEMU of this machine boots a guest whose disk is ours. This machine's files by virtiofs.
NESTED = """
need brd rd_nr=1 rd_size=65536
need vhost_blk
export VSHUNT_CONTROL=/tmp/control
dd if=/dev/urandom of=/tmp/pattern bs=64k count=16 2>/dev/null
dd if=/tmp/pattern of=/dev/ram0 bs=64k 2>/dev/null
sum=$(sha256sum </tmp/pattern)
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
    -smp 1 -m 192 -object memory-backend-memfd,id=m,size=192M,share=on -numa node,memdev=m \\
    -kernel /mnt/vmlinux -initrd /mnt/initramfs \\
    -append "console=ttyS0 panic=-1 quiet nokaslr tsc=reliable no_timer_check mitigations=off" \\
    -chardev socket,id=c,path=/tmp/s -device vhost-user-blk-pci,chardev=c,num-queues=1 -serial stdio \\
    </dev/null >/tmp/inner.out 2>&1
tr -d '\\r' </tmp/inner.out | grep -E '^(ok|not ok) '
result "nested: QEMU ended well" grep -q '^inner end' /tmp/inner.out
result "nested: what the guest read is what the disk has" grep -q "^inner sum $sum" /tmp/inner.out
result "nested: what the guest wrote is on the disk" \\
    sh -c 'dd if=/dev/ram0 bs=64k skip=64 count=16 2>/dev/null | cmp - /tmp/pattern'
grep -q '^inner end' /tmp/inner.out || tail -n 20 /tmp/inner.out
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
dd if=/dev/vda of=/pattern bs=64k count=16 2>/dev/null
echo "inner sum $(sha256sum </pattern)"
dd if=/pattern of=/dev/vda bs=64k seek=64 conv=fsync 2>/dev/null && echo "ok nested: the guest wrote and flushed" \\
    || echo "not ok nested: the guest cannot write"
echo "inner end"
poweroff -f
"""


def relay(rig, base):
    k.Vm(rig, base, "relay", RELAY, memory_mib=1024).finish(120)


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
    """What the inner guest boots, as files of the outer one."""
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


def nested(rig, make_base, folder, modules):
    """An unmodified QEMU in the VM, with a guest whose disk is the kernel's."""
    qemu, _ = vm.qemu()
    if not modules.add("virtio_blk"):
        raise r.Skipped("the kernel has no module virtio_blk")
    base = make_base(inner_entries(folder, modules))
    # Not in the rig's folder: the path of a socket is short.
    socket = f"{tempfile.mkdtemp(dir=rig.dir)}/fs"
    r.Child(rig, "virtiofsd", [*virtiofsd(), f"--socket-path={socket}"])
    r.wait_for("virtiofsd listens", lambda: os.path.exists(socket))
    memory = 1536
    more = ["-object", f"memory-backend-memfd,id=memory,size={memory}M,share=on", "-numa", "node,memdev=memory"]
    more += ["-chardev", f"socket,id=fs,path={socket}", "-device", "vhost-user-fs-pci,chardev=fs,tag=host"]
    k.Vm(rig, base, "nested", NESTED.replace("@QEMU@", str(qemu)), memory_mib=memory, more=more, checks=False).finish(300)
