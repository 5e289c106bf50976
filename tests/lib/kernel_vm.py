"""A VM for the kernel module: a stock Debian kernel under TCG.

It has busybox, the modules and static programs.

`scripts/kernel` fetches the kernel and builds the module. A VM runs a shell script, the job,
which writes to its second serial port. Lines `ok NAME` and `not ok NAME: why` are results, and
`@@ end` is the last line. The first port is the kernel's console. Output there that a healthy
kernel does not write is a failure, too.

The stock kernel has neither KASAN nor lockdep nor kmemleak, and Debian has no kernel with them
(its -dbg packages contain only symbols). All checks that it has are on: slub_debug with poison,
red zones and owners for every cache, KFENCE, hardened lists and user copies, refcount warnings,
the detectors of soft lockups, stalls and hung tasks.
"""

import collections
import fcntl
import lzma
import os
import re
import struct
import subprocess
import time
from pathlib import Path

import rig as r
import vm

BOOT_S = 180.0
# More than a loaded machine may keep a VM waiting. Until init runs, lost ticks may come all at
# once, which looks like a stall of a minute: none is told.
PATIENT = "watchdog_thresh=30 rcupdate.rcu_cpu_stall_timeout=60 rcupdate.rcu_cpu_stall_suppress_at_boot=1"
# What a kernel says when something is wrong.
TROUBLE = re.compile(
    r"BUG[: ]|WARNING: |Oops|general protection|Unable to handle|KFENCE|KASAN|refcount_t|possible (recursive |circular )?lock"
    r"|INFO: (task|rcu)|blocked for more|soft lockup|rcu.*detected|Call Trace|scheduling while atomic|bad page"
    r"|Redzone|Poison overwritten|Object already free|Objects remaining|still has objects|slab error|Kernel panic"
    r"|sleeping function|list_(add|del) corruption|stack-protector|usercopy|kmemleak: [1-9]|ODEBUG|UBSAN|suspicious RCU|Out of memory"
)
# Bits of /proc/sys/kernel/tainted that a module from outside of the tree sets: it is one, and it is
# not signed.
TAINT_OURS = 1 << 12 | 1 << 13

INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/bin HOME=/ TERM=dumb
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t debugfs debug /sys/kernel/debug
mount -t tracefs trace /sys/kernel/tracing
mount -t configfs config /sys/kernel/config 2>/dev/null
mkdir -p /dev/shm
mount -t tmpfs shm /dev/shm
stty -F /dev/ttyS1 raw -echo 2>/dev/null
exec </dev/null >/dev/ttyS1 2>&1
# As PATIENT.
echo 60 >/proc/sys/kernel/hung_task_timeout_secs

say() { echo "@@ $*"; }

# A module with what it needs; the rest are its parameters.
need() {
    module=$1
    shift
    for d in $(sed -n "s/^$module: //p" /modules/needs); do [ -d /sys/module/$d ] || insmod /modules/$d.ko; done
    insmod /modules/$module.ko "$@"
}

# result NAME COMMAND...: a case that holds when the command succeeds; what it prints is why not.
result() {
    name=$1
    shift
    if why=$("$@" 2>&1); then echo "ok $name"; else echo "not ok $name: $(echo "$why" | tr '\\n' '|')"; fi
}

# fails WORDS COMMAND...: the command must fail and say this.
fails() {
    words=$1
    shift
    if said=$("$@" 2>&1); then echo "did not fail: $*"; return 1; fi
    case $said in *"$words"*) ;; *) echo "failed otherwise: $said"; return 1 ;; esac
}

# What the module allocated and did not free, by the owners that slub_debug notes: ours is among the
# innermost callers. Further out it is where a disk allocates for a bio of vhost_blk, and keeps it.
# Addresses of an unloaded module may be another's by now. Of vmalloc there is a list of its own.
left_over() {
    cat /sys/kernel/debug/slab/*/alloc_traces | awk -v RS= -v FS='\\n' '
        /do_init_module|copy_process/ { next }
        { for (n = 1; n <= 5; n++) if ($n ~ /\\[vhost_blk\\]/) { print; next } }' | head -n 12
    grep '\\[vhost_blk\\]' /proc/vmallocinfo | grep -v load_module
}

# After use: nothing is left, some frees being a moment late; and the module can be unloaded.
leaves_nothing() {
    [ -e /sys/kernel/debug/slab/kmalloc-64/alloc_traces ] || { echo "slub_debug is off"; return 1; }
    n=0
    while [ -n "$(left_over)" ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n + 1)); done
    left_over
    rmmod vhost_blk && [ $n -lt 300 ]
}

say ready
. /job
# Poison and red zones of what is still allocated, too.
for cache in /sys/kernel/slab/*/validate; do echo 1 >$cache 2>/dev/null; done
say tainted $(cat /proc/sys/kernel/tainted)
say end
sync
poweroff -f
"""


def kernel(command="fetch", timeout_s=900, **environment):
    """The last line of `scripts/kernel COMMAND`.

    The test is left out if the machine lacks something.
    """
    done = subprocess.run(
        [r.ROOT / "scripts/kernel", command], capture_output=True, text=True, timeout=timeout_s, env=os.environ | environment
    )
    if done.returncode == 3:
        raise r.Skipped((done.stderr.strip().splitlines() or ["?"])[-1])
    if done.returncode != 0:
        raise r.Failed(f"scripts/kernel {command} ended with {done.returncode}: {done.stderr[-1500:]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def static(path, package):
    """The bytes of a program that needs no library."""
    with open(path, "rb") as f:
        data = f.read()
    if b"/ld-linux" in data[:4096]:
        raise r.Skipped(f"{path} is not static (Debian package {package})")
    return data


def test_program(name):
    """The bytes of a static program of kmod/tests, built here."""
    out = r.target_dir() / "kmod/tests"
    out.mkdir(parents=True, exist_ok=True)
    r.tool("cc", "gcc")
    with open(out / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # groups that run side by side build here
        r.run([r.tool("make", "make"), "-s", "-C", r.ROOT / "kmod/tests", f"OUT={out}"], timeout_s=300)
        return static(out / name, "libc6-dev")


def with_libraries(programs):
    """Entries for programs that need libraries, name: path, as the machine's loader finds these."""
    entries, folders = {}, set()
    for name, path in programs.items():
        entries[f"bin/{name}"] = Path(path).read_bytes()
        listed = r.run([r.tool("ldd", "libc-bin"), path]).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            entries[library.lstrip("/")] = Path(library).read_bytes()
    for path in entries:
        folders.update(str(folder) for folder in Path(path).parents if str(folder) not in (".", "bin"))
    yield from ((folder, 0o040755, b"") for folder in sorted(folders))
    yield from ((path, 0o100755, data) for path, data in entries.items())


class Modules:
    """The kernel's own modules with their dependencies, and the module of this tree."""

    def __init__(self, folder):
        self.files = {}
        for path in (Path(folder) / "lib/modules").rglob("*.ko*"):
            self.files[path.name.split(".ko")[0].replace("-", "_")] = path
        self.data = {}
        self.order = {}

    def add(self, name, data=None):
        """Adds a module, `data` when it is not the kernel's, and what it needs; False where there is none."""
        if name in self.data:
            return True
        if data is None:
            if name not in self.files:
                return False
            data = self.files[name].read_bytes()
            if self.files[name].suffix == ".xz":
                data = lzma.decompress(data)
        self.data[name] = data
        before = []
        for needed in depends(data):
            # What is built in is no file.
            if self.add(needed):
                before += [*self.order[needed], needed]
        self.order[name] = list(dict.fromkeys(before))
        return True

    def add_ours(self):
        """Builds vhost_blk and adds it."""
        with open(kernel("build"), "rb") as f:
            self.add("vhost_blk", f.read())

    def entries(self):
        needs = "".join(f"{name}: {' '.join(order)}\n" for name, order in self.order.items())
        yield "modules/needs", 0o100644, needs.encode()
        for name, data in self.data.items():
            yield f"modules/{name}.ko", 0o100644, data


def depends(module):
    """The names after `depends=` of a module's .modinfo."""
    found = re.search(rb"\0depends=([^\0]*)\0", b"\0" + section(module, b".modinfo") + b"\0")
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []


def section(data, wanted):
    """A section of a 64-bit little-endian ELF file; empty if there is none."""
    table, size, count, names = struct.unpack_from("<Q", data, 40) + struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQ", data, table + n * size) for n in range(count)]
    for head in heads:
        start = heads[names][4] + head[0]
        if data[start : data.index(b"\0", start)] == wanted:
            return data[head[4] : head[4] + head[5]]
    return b""


def of_another_kernel(module):
    """The module as if it had been built for another kernel: all its symbol versions are others.

    Where symbols have versions the kernel does not compare its release with the module's."""
    versions = section(module, b"__versions")
    # A CRC in 8 bytes and a name in 56, of each symbol.
    others = b"".join(
        bytes([versions[at] ^ 0xFF]) + versions[at + 1 : at + 64] for at in range(0, len(versions), 64)
    )
    r.require(versions and module.count(versions) == 1, "the module has no symbol versions")
    return module.replace(versions, others)


# A breakpoint in the kernel's own text whose patching has ended: several vCPUs under TCG kept
# translated code that was replaced (QEMU before 8.1; its developers met it as "int3" in boots of
# Linux, some in a thousand). With all vCPUs in one thread it cannot happen. In a module's text,
# ours above all, it is a fault like others.
STALE_INT3 = re.compile(r"Oops: int3: 0000(?:(?!RIP: )[\s\S])*RIP: 0010:\w+\+0x\w+/0x\w+\s*$", re.M)


class Base:
    """The kernel and the initramfs without a job, which every VM of a run boots."""

    def __init__(self, rig, folder, modules, programs, more=()):
        self.kernel = f"{folder}/vmlinuz"
        self.initramfs = rig.dir / "initramfs"
        entries = [(name, 0o040755, b"") for name in ("bin", "dev", "proc", "sys", "tmp", "mnt", "modules", "host")]
        entries += [("init", 0o100755, INIT.encode())]
        entries += [("bin/busybox", 0o100755, static(r.tool("busybox", "busybox-static"), "busybox-static"))]
        entries += [(f"bin/{name}", 0o100755, data) for name, data in programs.items()]
        data = vm.cpio([*entries, *more, *modules.entries()])
        self.initramfs.write_bytes(data + b"\0" * (-len(data) % 512))


class Vm:
    """One VM that runs `job`.

    counting: its clock is the number of instructions executed, one for each nanosecond, and nothing
    looks for faults. So CPU time is a number of instructions (with one vCPU). checks: with the
    kernel's checks of allocations. before_start: is called before each start of QEMU."""

    def __init__(self, rig, base, name, job, memory_mib=768, vcpus=2, more=(), counting=False, checks=True, before_start=lambda: None):
        self.rig, self.name, self.before_start = rig, name, before_start
        self.console = rig.dir / f"{name}.console"
        initramfs = rig.dir / f"{name}.initramfs"
        initramfs.write_bytes(base.initramfs.read_bytes() + vm.archive("job", job.encode()))
        # 7.2 emulates cmpxchg16b wrongly under load.
        self.argv = ["-cpu", "qemu64,-cx16", "-smp", 1 if counting else vcpus, "-m", memory_mib]
        self.argv += ["-kernel", base.kernel, "-initrd", initramfs]
        self.argv += [
            "-append",
            f"console=ttyS0 panic=-1 oops=panic ignore_loglevel no_timer_check mitigations=off {PATIENT} "
            + ("tsc=reliable" if counting else "slub_debug=FZPU kfence.sample_interval=20" if checks else "nokaslr")
            + ("" if counting else vm.clock()),
        ]
        self.argv += ["-serial", f"file:{self.console}", "-serial", "stdio", *more]
        self.seen = collections.Counter()
        self.wrong = []
        self.start("tcg,thread=single" if counting else "tcg,thread=multi", ["-icount", "shift=0"] if counting else [])

    def start(self, accel, more=()):
        program, _ = vm.qemu()
        argv = [program, "-nodefaults", "-display", "none", "-no-reboot", "-no-user-config", "-accel", accel, *more]
        self.before_start()
        self.child = r.Child(self.rig, self.name, [*argv, *self.argv])
        self.before = self.seen.copy()
        self.read = 0
        self.results = 0

    def take(self, record):
        """Takes the results that came since the last time."""
        lines = self.child.output().splitlines(keepends=True)
        for line in lines[self.read :]:
            if not line.endswith("\n"):
                break
            self.read += 1
            line = line.strip()
            self.results += line.startswith(("ok ", "not ok "))
            # Of a VM that was started again: taken already.
            if self.before[line]:
                self.before[line] -= 1
                continue
            self.seen[line] += 1
            if line.startswith("not ok "):
                self.wrong.append(line[7:])
            elif line.startswith(("ok ", "skip ")):
                record(*line.split(" ", 1))
            elif line and not line.startswith("@@ "):
                self.rig.say(f"{self.name}: {line}")

    def said(self, word):
        """The rest of the line `@@ WORD …`, or None."""
        found = re.search(rf"^@@ {re.escape(word)}(?: (.*?))?\r?$", self.child.output(), re.M)
        return found and (found[1] or "")

    def log(self):
        """The output of the kernel on its console so far."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def until_end(self, timeout_s, record):
        """Waits for the end; whether the VM hung and was killed."""
        end = time.monotonic() + timeout_s
        while self.child.running() and time.monotonic() < end:
            self.take(record)
            time.sleep(0.1)
        hung = self.child.running()
        if hung:
            self.child.kill()
        self.take(record)
        return hung

    def finish(self, timeout_s, record=lambda word, name: None):
        """Waits for the end. All results must be right, and the kernel's log clean. `record` is called
        with each result that is right, as ("ok", name), and with what the job left out, as
        ("skip", why)."""
        hung = self.until_end(timeout_s + BOOT_S, record)
        stale = STALE_INT3.search(self.log())
        if stale:
            where = stale[0].split()[-1]
            self.rig.say(f"{self.name}: QEMU ran code of {where} that was patched long ago; again, in one thread")
            self.console.rename(self.console.with_suffix(".int3.console"))
            self.start("tcg,thread=single")
            hung = self.until_end(2 * timeout_s + BOOT_S, record)
        faults = list(self.wrong)
        try:
            self.check_log(hung, timeout_s)
        except r.Failed as e:
            faults.append(f"the kernel's log: {e}")
        r.require(not faults, f"{self.name}: " + "\n".join(faults))

    def check_log(self, hung, timeout_s):
        """The job came to its end, and the kernel complained about nothing."""
        console = self.log()
        trouble = [line for line in console.splitlines() if TROUBLE.search(line)]
        tail = "\n".join(console.splitlines()[-40:])
        if hung:
            self.rig.line(tail)
            raise r.Failed(f"did not end within {timeout_s + BOOT_S:g} s and was killed; the console's end is above")
        if trouble:
            at = console.index(trouble[0])
            self.rig.line(console[max(0, at - 400) : at + 5000])
            raise r.Failed(f"the kernel complained, see above: {trouble[0].strip()}")
        if self.said("end") is None:
            self.rig.line(tail)
            raise r.Failed(f"the VM ended before its job did: {self.child.tail(5)}")
        taint = int(self.said("tainted") or 0) & ~TAINT_OURS
        r.require(taint == 0, f"the kernel is tainted: {taint:#x}")
        r.require(self.results, "the job had no results")
