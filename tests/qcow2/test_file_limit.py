"""Signals that the kernel sends for what one call may not do: that call fails, and all the rest continues.

The limit of the size of files (RLIMIT_FSIZE: `ulimit -f`, `LimitFSIZE=`) is one; its SIGXFSZ would end the program.
"""

import errno
import os
import re
import resource
import shlex
import signal
from pathlib import Path

import pytest
import rig as r
import snapshot_model
from qcow2_disks import MIB, mounts

LIMIT = 4 * MIB


def limit(pid):
    """Sets the limit. The hard one, too, as `ulimit -f` and LimitFSIZE= do, if the tests may raise it again (CAP_SYS_RESOURCE)."""
    (effective,) = re.findall(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    hard = LIMIT if int(effective, 16) >> 24 & 1 else resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (LIMIT, hard))


@pytest.mark.parametrize("place", ("disk", "memory"))
@pytest.mark.parametrize("form", ("raw", "qcow2"))
def test_a_file_that_may_not_grow_fails_requests_only(rig, form, place):
    mounts()
    name = f"limit-{form}-{place}"
    path = (rig.memory_dir() if place == "memory" else rig.dir) / f"{name}.{form}"
    r.run([r.tool("qemu-img", "qemu-utils"), "create", "-q", "-f", form, path, 32 * MIB])
    disk = snapshot_model.Disk(rig, path, form, name=name)
    child = disk.daemon.child
    with open(disk.file, "r+b", buffering=0) as f:
        os.pwrite(f.fileno(), b"a" * MIB, 0)
        limit(child.pid)
        errors = []
        for number in range(1, 32):
            try:
                os.pwrite(f.fileno(), bytes([number]) * MIB, number * MIB)
            except OSError as e:
                errors.append(e.errno)
        r.require(child.running(), f"the daemon ended with {child.process.returncode}")
        r.require(set(errors) == {errno.EFBIG} and len(errors) >= 27, f"writes fail with {errors}")
        r.require(os.pread(f.fileno(), MIB, 0) == b"a" * MIB, "what was written is not there")
        line = r.wait_for("the log has it", lambda: next((x for x in child.output().splitlines() if "File too large" in x), None))
        r.require(str(path) in line and f"no file longer than {LIMIT} bytes: as root, prlimit" in line, line)
        # The remedy.
        command = re.search(r"prlimit --pid \d+ --fsize=unlimited", line)
        r.require(command, f"there is no command in: {line}")
        r.run(shlex.split(command[0]))
        for number in range(1, 32):
            os.pwrite(f.fileno(), bytes([number]) * MIB, number * MIB)
        os.fsync(f.fileno())
        for number in range(1, 32):
            r.require(os.pread(f.fileno(), MIB, number * MIB) == bytes([number]) * MIB, f"MiB {number} is another")
    disk.quit()
    if form == "qcow2":
        r.run([r.tool("qemu-img", "qemu-utils"), "check", "-q", path])


def test_a_write_of_some_bytes_that_fails_is_in_the_log(rig):
    """A thread of its own reads and writes the whole block."""
    mounts()
    path = rig.image("some-bytes.raw", 32 * MIB)
    disk = snapshot_model.Disk(rig, path, "raw", name="some-bytes")
    child = disk.daemon.child
    with open(disk.file, "r+b", buffering=0) as f:
        limit(child.pid)
        with pytest.raises(OSError, match="File too large"):
            os.pwrite(f.fileno(), b"a" * 100, 8 * MIB + 50)
        said = f"{path}: a write at byte {8 * MIB + 50} failed: File too large"
        r.wait_for("the log has it", lambda: said in child.output())
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.pwrite(f.fileno(), b"a" * 100, 8 * MIB + 50)
    disk.quit()


@pytest.mark.parametrize(
    "command",
    (
        "convert -O raw SOURCE TARGET", "convert -O qcow2 SOURCE TARGET", "dd -O raw bs=1M if=SOURCE of=TARGET",
        "create -f raw TARGET 8M", "create -f qcow2 -o preallocation=full TARGET 8M", "create -f qcow2 -o preallocation=falloc TARGET 8M",
        "resize -f raw SOURCE 64M",
    ),
)  # fmt: skip
def test_image_commands_say_what_is_wrong(rig, command):
    source, target = rig.dir / "source.raw", rig.dir / "target"
    if not source.exists():
        source.write_bytes(os.urandom(8 * MIB))
    target.unlink(missing_ok=True)
    words = [{"SOURCE": str(source), "TARGET": str(target)}.get(word.split("=")[-1], word) for word in command.split()]
    words = [f"{old.split('=')[0]}={new}" if "=" in old and new != old else new for old, new in zip(command.split(), words)]
    done = r.run([r.tool("prlimit", "util-linux"), f"--fsize={LIMIT}", r.binary("vshunt"), "image", *words], check=False)
    r.require(done.returncode == 1, f"{command} ended with {done.returncode}: {done.stderr}")
    r.require("File too large" in done.stderr and len(done.stderr.splitlines()) == 1, f"{command} says {done.stderr}")


@pytest.mark.parametrize("name", ("SIGXFSZ", "SIGPIPE", "SIGTTOU", "SIGTTIN"))
def test_a_daemon_neither_ends_nor_stops(rig, name):
    daemon = r.Daemon(rig, "--disk", f"name=d0,format=ram,size={MIB}", name=f"goes-on-{name}")
    os.kill(daemon.child.pid, signal.Signals[name])
    daemon.status()
    r.require(daemon.child.running(), f"{name} ends it")
    # The kernel does not stop a process group that no shell controls.
    (ignored,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{daemon.child.pid}/status").read_text(), re.MULTILINE)
    r.require(int(ignored, 16) >> (signal.Signals[name] - 1) & 1, f"{name} is not ignored")
    r.require(daemon.child.stop() == 0, daemon.child.tail())
