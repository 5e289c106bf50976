"""A real guest: an unmodified QEMU under TCG boots a Debian kernel with a vhost-user device.

The device is a disk or a network device. The guest runs a shell script, the job, and writes lines
that begin with `@@ ` to its second serial port. The first is `@@ ready`, the last `@@ end`. `@@
trouble …` is a complaint of its kernel. `scripts/guest-image` makes the image that it boots.
"""

import ctypes
import functools
import mmap
import os
import platform
import re
import subprocess
import sys
import time

from rig import ROOT, Child, Daemon, Failed, Rig, Skipped, require, run, tool, wait_for

# Under TCG with four vCPUs on two shared cores; it takes 3–8 s.
BOOT_S = 120.0
# A kernel that stands still in its boot, in code of its own: several vCPUs under TCG kept
# translated code that was patched since (QEMU before 8.1, see kernel_vm.STALE_INT3). With all vCPUs
# in one thread it cannot happen. A device that does not answer makes a task wait, which is no
# lockup.
STANDS_STILL = re.compile(r"BUG: soft lockup - CPU#\d+ stuck|self-detected stall on CPU|Oops: int3: 0000")


def image():
    """The folder with vmlinuz and initramfs. The test is left out if it cannot be made."""
    done = subprocess.run([ROOT / "scripts/guest-image"], capture_output=True, text=True, timeout=600)
    if done.returncode == 3:
        raise Skipped(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        raise Failed(f"scripts/guest-image ended with {done.returncode}: {done.stderr[-600:]}")
    return done.stdout.strip().splitlines()[-1]


def qemu():
    """QEMU and its version as (major, minor)."""
    path = os.environ.get("VSHUNT_QEMU") or tool("qemu-system-x86_64", "qemu-system-x86")
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", text)
    if not found:
        raise Failed(f"{path} --version says {text!r}")
    return path, (int(found[1]), int(found[2]))


@functools.cache
def clock():
    """What a guest kernel is told of its time stamp counter, which is this machine's: its frequency.

    The kernel measures it at its start. Under TCG on busy CPUs that went wrong by a factor of 50, without a word: the guest's clock ran
    so much too fast, and its waits ended before what they waited for.
    """
    if platform.machine() != "x86_64":
        return ""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # rdtsc; shl $32, %rdx; or %rdx, %rax; ret
    page.write(bytes.fromhex("0f3148c1e2204809d0c3"))
    ticks = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    found = []
    for _ in range(5):
        begin, first = time.monotonic_ns(), ticks()
        time.sleep(0.02)
        end, last = time.monotonic_ns(), ticks()
        found.append((last - first) * 1_000_000 // (end - begin))
    return f" tsc_early_khz={sorted(found)[2]}"


def cpio(entries):
    """A cpio archive (newc) of (name, mode, content); can be put behind another one."""

    def entry(name, mode, content):
        name = name.encode() + b"\0"
        fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        head = b"070701" + b"".join(b"%08X" % f for f in fields) + name
        return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)

    return b"".join(entry(*one) for one in entries) + entry("TRAILER!!!", 0, b"")


def archive(path, data):
    """A cpio archive with one file, to be put behind the initramfs."""
    return cpio([(path, 0o100755, data)])


class Guest:
    """A guest with a disk on a vhost-user socket, or a network device with `net` (its address), running `job`.

    `tap`: the NIC is on QEMU's own tap of this name, without vhost, and not on `socket`. `inside`: the beginning of an argv
    that starts QEMU elsewhere, and becomes it. `more` is for subprocess.
    """

    def __init__(
        self,
        rig,
        socket,
        job,
        queues=4,
        vcpus=4,
        memory_mib=640,
        reconnect=False,
        packed=False,
        net=None,
        tap=None,
        inside=(),
        name="guest",
        **more,
    ):
        folder = image()
        program, version = qemu()
        initramfs = rig.dir / f"{name}.initramfs"
        with open(initramfs, "wb") as f:
            with open(f"{folder}/initramfs", "rb") as base:
                f.write(base.read())
            f.write(archive("job", job.encode()))
        chardev = f"socket,id=back,path={socket}"
        if reconnect:
            # The option in whole seconds went away in QEMU 10.
            chardev += ",reconnect-ms=500" if version >= (9, 2) else ",reconnect=1"
        self.console = rig.dir / f"{name}.console"
        if net:
            # Two vectors a pair, one for changes, one for the control queue; no boot ROM. 7.2
            # without KVM has no memory for what it keeps of vectors, and falls when vhost-user's
            # are unmasked.
            vectors = 2 * queues + 2 if version >= (8, 0) else 0
            device = f"virtio-net-pci,netdev=net,mac={net},mq=on,vectors={vectors},romfile="
        else:
            device = f"vhost-user-blk-pci,chardev=back,num-queues={queues}"
        if packed:
            device += ",packed=on"
        argv = [*inside, program, "-name", f"{name},debug-threads=on", "-nodefaults", "-display", "none", "-no-reboot", "-no-user-config"]
        # 7.2 emulates cmpxchg16b wrongly under load.
        argv += ["-accel", "tcg,thread=multi", "-cpu", "qemu64,-cx16", "-smp", vcpus, "-m", memory_mib]
        argv += ["-object", f"memory-backend-memfd,id=memory,size={memory_mib}M,share=on", "-numa", "node,memdev=memory"]
        argv += ["-kernel", f"{folder}/vmlinuz", "-initrd", initramfs]
        command_line = "console=ttyS0 panic=-1 quiet oops=panic no_timer_check mitigations=off" + clock()
        argv += ["-append", command_line + (" vshunt.disk=no" if net else "")]
        argv += ["-serial", f"file:{self.console}", "-serial", "stdio"]
        argv += ["-device", device]
        if not tap:
            argv += ["-chardev", chardev]
        if net:
            back = f"tap,ifname={tap},script=no,downscript=no,vhost=off" if tap else "vhost-user,chardev=back"
            argv += ["-netdev", f"{back},id=net,queues={queues}"]
        self.start(rig, name, argv, **more)

    def start(self, rig, name, argv, **more):
        """Starts QEMU with `argv`. `more` is for subprocess."""
        self.rig, self.name, self.argv, self.more = rig, name, [str(word) for word in argv], more
        self.child = Child(rig, name, self.argv, stdin=subprocess.PIPE, **more)

    def started_again(self):
        """Starts QEMU again, in one thread, if the guest's kernel stands still before the job began. Whether it did."""
        threads = "tcg,thread=multi"
        if threads not in self.argv or self.said("ready") or not self.console.exists():
            return False
        found = STANDS_STILL.search(self.console.read_text(errors="replace"))
        if not found:
            return False
        self.rig.say(f"{self.name}: the guest's kernel stood still in its boot ({found[0]}); again, in one thread")
        self.child.kill()
        self.console.rename(self.console.with_suffix(".stood.console"))
        self.start(self.rig, self.name, ["tcg,thread=single" if word == threads else word for word in self.argv], **self.more)
        return True

    def tell(self, word):
        """A line for the job, by the same port that it speaks through."""
        self.child.process.stdin.write(f"{word}\n".encode())
        self.child.process.stdin.flush()

    def lines(self):
        """The complete lines that the guest has written so far."""
        return [line[3:].strip() for line in self.child.output().splitlines() if line.startswith("@@ ")]

    def said(self, word):
        """The rest of the line that begins with `word`, or None."""
        for line in self.lines():
            if line == word or line.startswith(word + " "):
                return line[len(word) :].strip() or True
        return None

    def expect(self, word, timeout_s=BOOT_S):
        """Wait until the guest says `word`; the rest of that line. A guest that is started again has the time once more."""

        again = []

        def look():
            if self.started_again():
                again.append(True)
                return True
            # In this order: the last thing that it does may be to say the word.
            running = self.child.running()
            found = self.said(word)
            if found is None and not running:
                raise Failed(f"the guest ended before it said {word!r}: {self.tail()}")
            return found

        try:
            found = wait_for(f"the guest says {word!r}", look, timeout_s, every_s=0.1)
            if again:
                # In one thread the vCPUs take turns.
                found = wait_for(f"the guest says {word!r}", look, 2 * timeout_s, every_s=0.1)
            return found
        except Failed as e:
            raise type(e)(f"{e}: {self.tail()}") from None

    def end(self, timeout_s=BOOT_S):
        """Wait for the guest's clean power-off; fails on anything its kernel complained about."""
        self.expect("end", timeout_s)
        code = self.child.wait(60.0)
        if code != 0:
            raise Failed(f"QEMU ended with {code}: {self.tail()}")
        trouble = [line for line in self.lines() if line.startswith("trouble")]
        if trouble:
            raise Failed("the guest's kernel complained: " + " | ".join(trouble))

    def tail(self):
        """The end of what guest and kernel said."""
        console = self.console.read_text(errors="replace").splitlines()[-8:] if self.console.exists() else []
        return "\n".join([self.child.tail(10), *console])


def fio(seconds, size_mib=24, folder="/mnt"):
    """Shell: four verifying jobs for `seconds`, one pinned to each vCPU and so to each queue. They write what `$round` says."""
    common = (
        f"--directory={folder} --size={size_mib}M --time_based --runtime={seconds} --direct=1 --ioengine=libaio "
        "--iodepth=8 --verify=crc32c --verify_backlog=64 --verify_fatal=1 --serialize_overlap=1 --fallocate=none "
        "--thread --eta=never --max_latency=0 --randseed=$((7 + ${round:-0}))"
    )
    jobs = " ".join(
        f"--name=job{cpu} --cpus_allowed={cpu} --rw={rw} --bs={bs}"
        for cpu, (rw, bs) in enumerate((("randwrite", "4k"), ("randrw", "16k"), ("randwrite", "64k"), ("write", "128k")))
    )
    return f"fio {common} {jobs}"


FIO_END = """
[ $rc = 0 ] || cat /tmp/fio.out
grep -E 'issued rwts|err=' /tmp/fio.out
say fio $rc
"""


def fio_job(seconds):
    """Shell: `fio` for so long; says `fio CODE`."""
    return f"""
say fio-start
{fio(seconds)} >/tmp/fio.out 2>&1
rc=$?
{FIO_END}"""


def fio_rounds(seconds):
    """Shell: `fio` again and again, each time for so long and other data, until it fails or the rig tells `stop`; then says
    `fio CODE`. For what is to go on for as long as the rig needs, on whatever machine."""
    return f"""
say fio-start
(read -r word </dev/ttyS1 && [ "$word" = stop ] && echo >/tmp/told) &
round=0 rc=0
until [ $rc != 0 ] || [ -e /tmp/told ]; do
    {fio(seconds)} >/tmp/fio.out 2>&1
    rc=$?
    round=$((round + 1))
done
{FIO_END}"""


# Shell: a file system on the disk, with the file /mnt/sum in it; says `mounted`, and its checksum
# as `sum`.
FILE_SYSTEM = """
mkfs.ext4 -q -F /dev/vda && mount -t ext4 /dev/vda /mnt && say mounted
dd if=/dev/urandom of=/mnt/sum bs=1M count=16 2>/dev/null
sync
say sum $(sha256sum /mnt/sum)"""

# Shell: says the checksum of /mnt/sum on the disk as `sum-again`, then `unmounted`.
SUM_AGAIN = """
echo 3 >/proc/sys/vm/drop_caches
say sum-again $(sha256sum /mnt/sum)
umount /mnt && say unmounted"""


def disk_daemon(rig, image, queues, workers=None, name="vshunt"):
    """A daemon that serves `image` as disk d0 on export vm0, and the export's socket."""
    socket = rig.dir / f"{name}.sock"
    export = f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket},queues={queues}"
    if workers:
        export += f",workers={workers}"
    return Daemon(rig, "--disk", f"name=d0,file={image}", "--export", export, name=name), socket


def stop_fio(guest, round_s):
    """Ends `fio_rounds(round_s)`, none of which may have failed."""
    guest.tell("stop")
    require(guest.expect("fio", round_s + BOOT_S) == "0", f"fio failed in the guest: {guest.tail()}")


def end_of_disk(guest, daemon):
    """Waits until the guest has unmounted its disk and powered off, then stops the daemon. No request may have failed."""
    guest.expect("unmounted")
    guest.end()
    errors = {q["index"]: q["errors"] for q in daemon.status()["queues"] if q["errors"]}
    require(not errors, f"requests failed, by queue: {errors}")
    require(daemon.child.stop() == 0, f"{daemon.name} ended with {daemon.child.process.returncode}: {daemon.child.tail()}")


def same_sum(guest):
    """The checksum of /mnt/sum, which the guest read twice."""
    sha = guest.said("sum").split()[0]
    require(guest.said("sum-again").split()[0] == sha, "the guest read back a file other than it wrote")
    return sha


def check_image(rig, image, sha):
    """Checks the image that the guest left, with tools of this machine."""
    done = run([tool("e2fsck", "e2fsprogs"), "-f", "-n", image], check=False)
    require(done.returncode == 0, f"e2fsck -fn ended with {done.returncode}: {done.stdout}{done.stderr}")
    copy = rig.dir / "sum"
    run([tool("debugfs", "e2fsprogs"), "-R", f"dump /sum {copy}", image])
    seen = run(["sha256sum", copy]).stdout.split()[0]
    require(seen == sha, f"the guest wrote a file with sha256 {sha}, the image has {seen}")
    copy.unlink()


def by_hand():
    """`scripts/guest SOCKET [JOB]`: boots a guest on a socket, shows what it says, ends with it."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: scripts/guest SOCKET [JOB]   (JOB: a shell script for the guest; default: fio for 10 s)")
    job = "mkfs.ext4 -q -F /dev/vda && mount -t ext4 /dev/vda /mnt\n" + fio_job(10) + "umount /mnt\n"
    if len(sys.argv) == 3:
        with open(sys.argv[2]) as f:
            job = f.read()
    rig = Rig("guest-by-hand")
    code = 0
    try:
        guest = Guest(rig, sys.argv[1], job)
        shown = 0
        while guest.child.running():
            text = guest.child.unfinished()
            print(text[shown:], end="", flush=True)
            shown = len(text)
            time.sleep(0.2)
        print(guest.child.unfinished()[shown:], end="", flush=True)
        guest.end()
    except (Failed, Skipped) as e:
        print(f"guest: {e}", file=sys.stderr)
        code = 1
    finally:
        rig.end()
    sys.exit(code)


if __name__ == "__main__":
    by_hand()
