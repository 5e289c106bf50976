"""Runs programs as a user without rights, for tests that run as root.

Root may open, enter and execute more than others. Each resource of that user is therefore checked as
that user, or made: a folder, the program, a Python, a device node.
"""

import contextlib
import os
import resource
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import rig as r

NOBODY = 65534


# The limit of locked memory of a user on most systems. It has room for some 150 io_urings of all
# processes of the user. Those of root do not count.
MEMLOCK_USUAL = 8 << 20


def lock_memory():
    """Raises the limit of locked memory to the usual one for the programs that this process starts."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = tuple(most if most == resource.RLIM_INFINITY else max(most, MEMLOCK_USUAL) for most in limit)
    if wanted != limit:
        try:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, wanted)
        except (OSError, ValueError) as e:
            raise r.Skipped("the limit of locked memory (ulimit -l) is below 8 MiB and cannot be raised") from e


def words(number=NOBODY):
    """The command that runs another one as this user, without groups."""
    lock_memory()
    argv = [r.tool("setpriv", "util-linux"), f"--reuid={number}", f"--regid={number}", "--clear-groups"]
    done = r.run([*argv, "true"], check=False, cwd="/")
    if done.returncode != 0:
        raise r.Skipped(f"this process cannot become user {number}: {done.stderr.strip()}")
    return argv


def can(number, *argv):
    """Whether this command of the user succeeds. It runs in the root folder, which all users can enter."""
    return r.run([*words(number), *argv], check=False, cwd="/").returncode == 0


@contextlib.contextmanager
def folder(rig, name, number=NOBODY):
    """A folder of the user, in `rig.dir`, or elsewhere if TMPDIR is closed to the user."""
    with contextlib.ExitStack() as stack:
        place = rig.dir
        others = iter(("/tmp", "/var/tmp"))
        place.chmod(0o755)
        while not can(number, "test", "-x", place):
            parent = next(others, None)
            if parent is None:
                raise r.Skipped(f"user {number} can enter neither {rig.dir} nor /tmp nor /var/tmp")
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"vshunt-{rig.name}.", dir=parent, ignore_cleanup_errors=True)))
            place.chmod(0o755)
        path = place / name
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
        os.chown(path, number, number)
        yield path


def program(place, number=NOBODY):
    """The program vshunt, where the user can execute it: a copy in the folder `place` if the build folder or the program is closed."""
    built = r.binary("vshunt")
    if can(number, "test", "-r", built, "-a", "-x", built):
        return built
    copy = place / "vshunt"
    if not copy.exists():
        shutil.copyfile(built, copy)
        copy.chmod(0o755)
    return str(copy)


def python(number=NOBODY):
    """A Python that the user can execute. That of the tests may lie in root's home."""
    for path in (sys.executable, "/usr/bin/python3"):
        if can(number, path, "-c", ""):
            return path
    raise r.Skipped(f"user {number} can execute neither {sys.executable} nor /usr/bin/python3")


def fusermount3():
    """Checks that fusermount3 can mount for users without rights."""
    path = Path(r.tool("fusermount3", "fuse3"))
    seen = path.stat()
    if seen.st_uid != 0 or not seen.st_mode & stat.S_ISUID or os.statvfs(path).f_flag & os.ST_NOSUID:
        raise r.Skipped(f"{path} is not set-user-id root")
    if "NoNewPrivs:\t1" in Path("/proc/self/status").read_text():
        raise r.Skipped("no_new_privs is set: fusermount3 gets no rights")


def with_device(node, mode, argv):
    """The command `argv`, in a mount namespace in which the device node has this mode. The machine's keeps its own."""
    script = (
        'set -e; d=$(mktemp -d); mount -t tmpfs dev "$d"; cp -a "$1" "$d/node"; chmod "$2" "$d/node"; '
        'mount --bind "$d/node" "$1"; umount -l "$d"; rmdir "$d"; shift 2; exec "$@"'
    )
    return [r.tool("unshare", "util-linux"), "-m", "--propagation", "private", "sh", "-c", script, "sh", node, f"{mode:o}", *argv]
