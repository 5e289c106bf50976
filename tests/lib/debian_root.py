"""A Debian root with systemd, booted in a container: systemd-nspawn on an overlay over a root that debootstrap made.

The root below is made once for each suite, in the cache, from the mirror that this machine's apt has. What a test writes is in
its own folder and goes with it.
"""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

import rig as r

CACHE = Path(os.environ.get("VSHUNT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vshunt")
# What a minimal root lacks of an ordinary machine.
INCLUDE = "systemd,systemd-sysv,dbus,udev"
MAKE_S = 600
BOOT_S = 120


def container():
    """The container that this machine is, as systemd names it; empty if it is none."""
    try:
        return Path("/run/systemd/container").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def mirror():
    """The Debian mirror of this machine."""
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(p.read_text(encoding="utf-8") for p in places if p.suffix in (".list", ".sources") and p.is_file())
    found = re.search(r"^(?:URIs: *|deb (?:\[[^]]*\] )?)(\S+/debian/?)(?:\s|$)", text, re.MULTILINE)
    if not found:
        raise r.Skipped("apt has no Debian mirror configured, so there is none to take a root from")
    return found[1]


def base(suite):
    """The folder of the root of a suite, which nobody may write."""
    debootstrap = r.tool("debootstrap", "debootstrap")
    folder = CACHE / "debian" / suite
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        # It has its name once it is whole.
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        argv = [debootstrap, "--variant=minbase", f"--include={INCLUDE}", suite, part, mirror()]
        done = r.run(argv, timeout_s=MAKE_S, check=False)
        if done.returncode:
            raise r.Skipped(f"debootstrap cannot make a root of {suite}: {r.one_line(done.stdout[-300:])}")
        part.rename(folder)
    return folder


def layers(suite, packages):
    """The folders of a root with these Debian packages, from the top, for an overlay. The upper one is made once, in the cache, too."""
    below = base(suite)
    if not packages:
        return [below]
    digest = hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:12]
    folder = below.with_name(f"{suite}-{digest}")
    with open(folder.parent / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part, work, merged = (folder.with_suffix(end) for end in (".part", ".work", ".merged"))
            for place in (part, work, merged):
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
            overlay([below], part, work, merged)
            try:
                for words in (["update"], ["-y", "--no-install-recommends", "install", *packages], ["clean"]):
                    done = outside(merged, ["apt-get", "-q", *words], check=False)
                    if done.returncode:
                        raise r.Skipped(f"apt-get cannot install {', '.join(packages)} in a root of {suite}: {r.one_line(done.stderr[-300:])}")
            finally:
                r.run(["umount", merged])
                shutil.rmtree(work, ignore_errors=True)
                merged.rmdir()
            part.rename(folder)
    return [folder, below]


def overlay(below, upper, work, merged):
    """Mounts an overlay over the folders `below`."""
    options = f"lowerdir={':'.join(map(str, below))},upperdir={upper},workdir={work}"
    done = r.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=False)
    if done.returncode:
        raise r.Skipped(f"no overlay can be mounted here: {r.one_line(done.stderr)}")


def outside(path, argv, check=True, timeout_s=MAKE_S):
    """Runs a program in a root that is not booted, with the network of this machine."""
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    mounted = "mount -t proc proc /proc && exec \"$@\""
    enter = ["unshare", "-m", "-p", "-f", "chroot", path, "sh", "-c", mounted, "sh"]
    return r.run([*enter, *argv], check=check, timeout_s=timeout_s, env=env)


class Root:
    """A root of its own for a test, with Debian packages of its choice. `with Root(rig, suite) as root` mounts it; `boot` starts its
    systemd."""

    def __init__(self, rig, suite, packages=()):
        self.rig, self.suite, self.packages = rig, suite, packages
        self.folder = rig.dir / f"root-{suite}"
        self.path = self.folder / "merged"
        self.container = self.leader = None

    def __enter__(self):
        if container() == "systemd-nspawn":
            raise r.Skipped("this machine is such a container itself: it can boot none, and has no network for apt")
        below = layers(self.suite, self.packages)
        for name in ("upper", "work", "merged"):
            (self.folder / name).mkdir(parents=True)
        overlay(below, self.folder / "upper", self.folder / "work", self.path)
        # Without one systemd takes it for a first boot, and enables all units.
        self.write("etc/machine-id", f"{uuid.uuid4().hex}\n")
        return self

    def __exit__(self, *_):
        if self.container:
            self.container.stop()
        r.run(["umount", self.path], check=False)

    def put(self, source, place):
        """Copies a file into the root."""
        shutil.copy(source, self.path / place)

    def write(self, place, text):
        (self.path / place).write_text(text, encoding="utf-8")

    def outside(self, *argv, check=True, timeout_s=MAKE_S):
        """Runs a program in the root before it is booted, with the network of this machine."""
        return outside(self.path, argv, check, timeout_s)

    def boot(self, *options, whole_sys=False):
        """Boots it, without a network, and waits until all services are started. `whole_sys`: /sys has all folders, read-only;
        systemd then mounts what an ordinary machine has in /sys/fs."""
        argv = [r.tool("systemd-nspawn", "systemd-container"), "--quiet", "--register=no", "--keep-unit", "--console=pipe", "-D", self.path]
        if whole_sys:
            # nspawn leaves out folders of /sys if it makes the network namespace itself.
            argv = [r.tool("unshare", "util-linux"), "--net", *argv, "--capability=CAP_NET_ADMIN", *options, "--boot"]
        else:
            argv = [*argv, "--private-network", *options, "--boot"]
        # The machines of this project's CI have version 1 of control groups, which newer ones
        # refuse unless told.
        env = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        self.container = r.Child(self.rig, f"nspawn-{self.suite}", argv, env=env)
        self.leader = r.wait_for(f"{self.suite} has a first process", self._first, BOOT_S)

        def started():
            r.require(self.container.running(), f"the container ended: {self.container.tail()}")
            return self.inside("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

        r.wait_for(f"{self.suite} is booted", started, BOOT_S, every_s=0.3)

    def kill(self):
        """Ends the booted root and all that runs in it, like a power failure."""
        if self.leader:
            os.kill(self.leader, signal.SIGKILL)
            self.container.wait()

    def _first(self):
        r.require(self.container.running(), f"the container ended: {self.container.tail()}")
        parents = [self.container.pid]
        while parents:
            pid = parents.pop()
            try:
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
                names = {int(c): Path(f"/proc/{c}/comm").read_text(encoding="ascii").strip() for c in children}
            except OSError:
                return None
            found = [child for child, name in names.items() if name == "systemd"]
            if found:
                return found[0]
            parents += names
        return None

    def inside(self, *argv, check=True, timeout_s=r.WAIT_S, **more):
        """Runs a program in the booted root."""
        return r.run(self.argv(*argv), check=check, timeout_s=timeout_s, **more)

    def argv(self, *argv):
        """The words that run a program in the booted root, from outside."""
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/root"}
        enter = ["nsenter", "-t", self.leader, "-m", "-u", "-i", "-n", "-p", "-r", "-w", "--"]
        return [*enter, "env", "-i", *(f"{k}={v}" for k, v in env.items()), *argv]

    def shell(self, script, check=True, timeout_s=r.WAIT_S):
        """Runs a script in the booted root. -> what it printed"""
        done = self.inside("sh", "-euc", script, check=False, timeout_s=timeout_s)
        if check and done.returncode:
            said = self.inside("journalctl", "-n", "15", "-o", "cat", "--no-pager", check=False).stdout
            raise r.Failed(f"`{script}` ended with {done.returncode}: {done.stdout[-600:]}{done.stderr[-600:]}; the journal ends with: {said}")
        return done.stdout


def devices():
    """Options of `Root.boot` that give it FUSE and taps, where this machine has them."""
    return [f"--bind={path}" for path in ("/dev/fuse", "/dev/net/tun") if os.path.exists(path)]


def versions(package):
    """The fields Version and Architecture of a package file."""
    done = subprocess.run(["dpkg-deb", "-f", package, "Version", "Architecture"], capture_output=True, text=True, check=True)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())
