"""The container image: built by podman as packaging/README.md says, it serves a disk to a front end outside over a shared folder."""

import re

import pytest
import rig as r

# Cgroups and limits are left as they are, because machines of CI may not permit to change them.
RUN = ("run", "--rm", "--network=none", "--cgroups=disabled", "--ulimit=nofile=4096:4096", "--ulimit=nproc=1000:1000")
BENCH = ("blk", "--rw", "randrw", "--verify", "--ios", "2000", "--queues", "2", "--quiet", "--socket")


class Podman:
    """Podman with a storage of its own."""

    def __init__(self, rig):
        self.rig, self.dir = rig, rig.dir
        program = r.tool("podman", "podman")
        r.tool("crun", "crun")
        # crun refuses the mix of both versions of control groups that some machines have.
        setup = '[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 none /sys/fs/cgroup; exec "$@"'
        enter = [r.tool("unshare", "util-linux"), "-m", "--propagation", "private", "sh", "-euc", setup, "podman"]
        options = ["--root", self.dir / "storage", "--runroot", self.dir / "state", "--storage-driver=vfs"]
        self.argv = [*enter, program, *options, "--runtime=crun", "--cgroup-manager=cgroupfs", "--events-backend=file"]

    def __call__(self, *arguments, check=True):
        return r.run([*self.argv, *arguments], check=check, timeout_s=120)

    def start(self, name, *arguments):
        return r.Child(self.rig, name, [*self.argv, *arguments])


@pytest.fixture(scope="module")
def podman(rig, tree):
    made = Podman(rig)
    recipe = r.ROOT / "packaging/container/Containerfile"
    done = made("build", "-q", "--isolation=chroot", "-t", "localhost/vshunt", "-f", recipe, tree, check=False)
    if done.returncode:
        # An error of the recipe is not one of the machine.
        r.require("STEP" not in done.stdout and "building at STEP" not in done.stderr, done.stderr)
        raise r.Skipped(f"podman builds no image here: {r.one_line(done.stderr[-300:])}")
    # The program says "no io_uring" with the profile of most distributions, but it runs.
    # On a loaded machine podman was seen to end well without the output of a container that ends
    # at once.
    for _ in range(3):
        done = made(*RUN, "localhost/vshunt", "--version", check=False)
        if done.returncode or done.stdout:
            break
    if done.returncode:
        raise r.Skipped(f"podman runs no container here: {r.one_line(done.stderr[-300:])}")
    r.require(done.stdout.startswith("vshunt "), f"vshunt --version in a container printed {done.stdout!r}, {done.stderr!r}")
    return made


@pytest.fixture(scope="module")
def profile(rig):
    """The seccomp profile that the command of packaging/README.md makes."""
    page = (r.ROOT / "packaging/README.md").read_text(encoding="utf-8")
    command = re.search(r"^python3 -c '.*?' <\S+ >vshunt-seccomp\.json$", page, re.MULTILINE | re.DOTALL)
    r.require(command, "packaging/README.md has no command that makes vshunt-seccomp.json")
    r.run(["sh", "-euc", command[0]], cwd=rig.dir)
    return rig.dir / "vshunt-seccomp.json"


def test_serves_a_front_end_outside(rig, podman, profile, tree):
    run, images = rig.dir / "run", rig.dir / "images"
    run.mkdir()
    images.mkdir()
    r.run([tree / "bin/vshunt", "image", "create", "-f", "qcow2", images / "disk.qcow2", "64M"])
    volumes = ("-v", f"{run}:/run/vshunt", "-v", f"{images}:/images")
    name = f"vshunt-{run.parent.name}"
    options = (*RUN, f"--security-opt=seccomp={profile}", *volumes, "--name", name)
    child = podman.start("serve", *options, "localhost/vshunt", "serve", "/images/disk.qcow2")
    socket = run / "disk.sock"

    def ready():
        r.require(child.running(), f"the container ended: {child.tail()}")
        return socket.exists() and "disk" in podman("exec", name, "vshunt", "status", check=False).stdout

    r.wait_for("the container serves", ready)
    r.run([tree / "bin/vshunt-bench", *BENCH, socket])
    # Commands reach it from outside as well.
    r.require("disk" in r.run([tree / "bin/vshunt", "-c", run / "control.sock", "status"]).stdout, "status from outside")
    podman("stop", name)
    r.require(child.wait() == 0, f"the container ended with {child.process.returncode}: {child.tail()}")
    r.run([tree / "bin/vshunt", "image", "check", images / "disk.qcow2"])


def test_image_has_the_program_and_nothing_else(rig, podman):
    name = f"vshunt-files-{rig.dir.name}"
    podman("create", "--name", name, "--network=none", "localhost/vshunt")
    archive = rig.dir / "image.tar"
    podman("export", "-o", archive, name)
    listed = set(r.run(["tar", "-tf", archive]).stdout.split())
    files = {path for path in listed if not path.endswith("/")}
    doc = "usr/share/doc/vshunt/"
    expected = {"usr/bin/vshunt", f"{doc}LICENSE-APACHE", f"{doc}LICENSE-MIT", f"{doc}sbom.cdx.json"}
    r.require(files == expected, f"the image has {sorted(files)}")
    podman("rm", name)
