"""`make static`: programs that need nothing of the system that they run on, their SBOM, and the tarball's bytes.

They are built without optimisation, which takes a third of the time. Whole builds in two folders are compared by `make reproducible`.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import rig as r

BENCH = ("blk", "--rw", "randrw", "--verify", "--ios", "2000", "--queues", "2", "--quiet", "--socket")


def one(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


def test_names_and_checksums(static, tree):
    version = re.search(r'^version = "(.*)"', (r.ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    name = f"vshunt-{version}-{os.uname().machine}-linux"
    listed = sorted(p.name for p in static.iterdir())
    r.require(listed == ["SHA256SUMS", f"{name}.cdx.json", f"{name}.tar.gz"], f"the results are {listed}")
    r.require(tree.name == name, f"the folder in the tarball is {tree.name}")
    sums = dict(reversed(line.split()) for line in (static / "SHA256SUMS").read_text(encoding="ascii").splitlines())
    for file in (f"{name}.cdx.json", f"{name}.tar.gz"):
        r.require(sums[file] == hashlib.sha256((static / file).read_bytes()).hexdigest(), f"the sum of {file} differs")
    for place in (
        *("bin/vshunt", "bin/vshunt-bench", "libexec/vshunt-blk", "share/man/man1/vshunt-serve.1", "lib/systemd/system/vshunt@.service"),
        *("share/bash-completion/completions/vshunt", "lib/sysusers.d/vshunt.conf", "share/doc/vshunt/LICENSE-MIT"),
        *("share/doc/vshunt/README.md", "share/doc/vshunt/sbom.cdx.json", "share/qemu/vhost-user/50-vshunt-blk.json"),
    ):
        r.require((tree / place).exists(), f"{place} is missing")
    r.require(f"vshunt {version}" in r.run([tree / "bin/vshunt", "--version"]).stdout, "the program tells another version")


def test_owners_modes_and_dates(static):
    """They are those of the commit, not those of the user who packs."""
    with tarfile.open(one(static, "*.tar.gz")) as tar:
        members = tar.getmembers()
    r.require([m.name for m in members] == sorted(m.name for m in members), "the files are not in order")
    r.require({(m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, "", "")}, "owners")
    r.require(len({m.mtime for m in members}) == 1, "dates")
    modes = {(m.type, oct(m.mode)) for m in members}
    allowed = {(tarfile.DIRTYPE, "0o755"), (tarfile.REGTYPE, "0o644"), (tarfile.REGTYPE, "0o755"), (tarfile.SYMTYPE, "0o777")}
    r.require(modes <= allowed, f"modes: {modes - allowed}")


@pytest.mark.parametrize("program", ["vshunt", "vshunt-bench"])
def test_needs_no_library(tree, program):
    path = tree / "bin" / program
    headers = r.run([r.tool("readelf", "binutils"), "-lWd", path]).stdout
    r.require("INTERP" not in headers and "NEEDED" not in headers, headers)
    done = r.run([r.tool("ldd", "libc-bin"), path], check=False)
    r.require("statically linked" in done.stdout or "not a dynamic executable" in done.stdout + done.stderr, done.stdout + done.stderr)


def test_no_path_of_this_machine(tree):
    """The folders of the sources, of cargo and of the toolchain are in no file."""
    sysroot = r.run([os.environ.get("RUSTC", "rustc"), "--print", "sysroot"]).stdout.strip()
    cargo = os.environ.get("CARGO_HOME") or str(Path.home() / ".cargo")
    folders = {str(r.ROOT), str(r.target_dir()), cargo, sysroot}
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            for folder in folders:
                at = data.find(folder.encode() + b"/")
                r.require(at < 0, f"{path.name} has {data[at : at + 120]!r}")


def test_packed_twice(static, again, record):
    """Another folder, file mode mask and time zone give the same bytes."""
    again = again("static")
    sums = (static / "SHA256SUMS").read_text(encoding="ascii"), (again / "SHA256SUMS").read_text(encoding="ascii")
    r.require(sums[0] == sums[1], f"packed twice: {sums}")
    record("skip", "two builds in different folders are compared by `make reproducible`: they take too long for each run")


class Empty:
    """A root with the program, and with the file systems that every container has: /proc and /dev/shm."""

    def __init__(self, rig, tree):
        self.rig, self.path = rig, rig.dir / "empty"
        for folder in ("proc", "dev/shm", "srv"):
            (self.path / folder).mkdir(parents=True)
        shutil.copy(tree / "bin/vshunt", self.path / "vshunt")
        mounts = 'mount -t proc proc "$0/proc"; mount -t tmpfs tmpfs "$0/dev/shm"; exec chroot "$0" /vshunt "$@"'
        self.enter = [r.tool("unshare", "util-linux"), "-m", "--propagation", "private", "sh", "-euc", mounts, self.path]
        self.daemons = 0

    def run(self, *arguments, check=True):
        return r.run([*self.enter, *arguments], check=check)

    def serve(self, export):
        """A daemon with the disk /srv/disk.qcow2."""
        self.daemons += 1
        disk = "name=d0,file=/srv/disk.qcow2,format=qcow2"
        argv = ["serve", "--control", "/srv/control.sock", "--disk", disk, "--export", f"type=vhost-user-blk,name=vm0,disk=d0,{export}"]
        child = r.Child(self.rig, f"serve-{self.daemons}", [*self.enter, *argv])

        def ready():
            r.require(child.running(), f"ended with {child.process.returncode}: {child.tail()}")
            return self.run("-c", "/srv/control.sock", "status", check=False).returncode == 0

        r.wait_for("the daemon answers", ready)
        return child


@pytest.fixture(scope="module")
def empty(rig, tree):
    made = Empty(rig, tree)
    made.run("image", "create", "-f", "qcow2", "/srv/disk.qcow2", "64M")
    return made


def test_serves_from_an_empty_root(empty, tree):
    """Disk and socket in a root that has nothing but the program; the front end is outside."""
    child = empty.serve("socket=/srv/vm0.sock,queues=2")
    r.run([tree / "bin/vshunt-bench", *BENCH, empty.path / "srv/vm0.sock"])
    r.require(child.stop() == 0, child.tail())
    r.require("warning" not in child.output(), child.output())
    empty.run("image", "check", "/srv/disk.qcow2")


def test_names_of_users_without_a_name_service(empty):
    """`owner=` and `group=` by name are looked up in /etc/passwd and /etc/group of the root, without libraries."""
    (empty.path / "etc").mkdir()
    (empty.path / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nguest:x:4242:4243::/:/bin/false\n")
    (empty.path / "etc/group").write_text("root:x:0:\nmachines:x:4244:\n")
    child = empty.serve("socket=/srv/access.sock,owner=guest,group=machines,mode=0660")
    seen = (empty.path / "srv/access.sock").stat()
    r.require((seen.st_uid, seen.st_gid, seen.st_mode & 0o777) == (4242, 4244, 0o660), f"the socket is {seen}")
    r.require(child.stop() == 0, child.tail())
    export = "type=vhost-user-blk,name=vm0,disk=d0,socket=/srv/s.sock,owner=nobody"
    done = empty.run("serve", "--control", "/srv/c.sock", "--disk", "name=d0,format=null,size=1M", "--export", export, check=False)
    r.message_of(done, "there is no user nobody in /etc/passwd")


@pytest.fixture(scope="module")
def sbom(static):
    return json.loads(one(static, "*.cdx.json").read_text(encoding="utf-8"))


def test_sbom_is_valid(static):
    """CycloneDX's own checker accepts it; scripts/packages installs that beside the other Python programs."""
    cache = Path(os.environ.get("VSHUNT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vshunt")
    program = (
        "import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import JsonStrictValidator\n"
        "wrong = JsonStrictValidator(SchemaVersion.V1_5).validate_str(open(sys.argv[1], encoding='utf-8').read())\n"
        "sys.exit(wrong and str(wrong))"
    )
    for python in (sys.executable, str(cache / "tools/python/bin/python3")):
        if shutil.which(python) and not subprocess.run([python, "-c", "import cyclonedx"], capture_output=True).returncode:
            r.run([python, "-c", program, one(static, "*.cdx.json")])
            return
    raise r.Skipped("the Python package cyclonedx-python-lib is missing (scripts/packages)")


def test_sbom_lists_what_is_in_the_programs(sbom):
    """Its crates are those that cargo lists for the two programs, with Cargo.lock's hashes; nothing changes from run to run."""
    listed = {(c["name"], c["version"]): c for c in sbom["components"] if c["purl"].startswith("pkg:cargo/")}
    target = sbom["metadata"]["properties"][0]["value"]
    argv = [os.environ.get("CARGO", "cargo"), "tree", "--locked", "--target", target, "-e", "normal", "--prefix", "none", "-f", "{p}"]
    tree = r.run([*argv, "-p", "vshunt", "-p", "vshunt-bench"], cwd=r.ROOT).stdout
    expected = {(line.split()[0], line.split()[1][1:]) for line in tree.splitlines() if line}
    r.require(expected <= set(listed), f"missing: {expected - set(listed)}")
    scopes = {name: found["scope"] for (name, _), found in listed.items()}
    r.require(scopes["rustix"] == "required" and scopes["serde_derive"] == "excluded" and scopes["cc"] == "excluded", f"scopes: {scopes}")
    r.require("proptest" not in scopes and "loom" not in scopes, "crates of tests are listed")
    lock = (r.ROOT / "Cargo.lock").read_text(encoding="utf-8")
    ours = [re.search(r'^name = "(.*)"', p.read_text(encoding="utf-8"), re.MULTILINE)[1] for p in r.ROOT.glob("crates/*/Cargo.toml")]
    for (name, version), found in listed.items():
        r.require(name in ours or found["hashes"][0]["content"] in lock, f"{name} {version} has no hash of Cargo.lock")
        r.require(found["licenses"][0]["expression"], f"{name} has no licence")
    refs = {c["bom-ref"] for c in sbom["components"]} | {sbom["metadata"]["component"]["bom-ref"]}
    edges = {d["ref"]: d["dependsOn"] for d in sbom["dependencies"]}
    r.require(set(edges) == refs, f"the graph lacks {refs - set(edges)}")
    r.require(all(to in refs for tos in edges.values() for to in tos), "an edge leads to nothing")
    others = {c["name"] for c in sbom["components"]} - {name for name, _ in listed}
    r.require({"zstd", "rust-std"} <= others and others & {"glibc", "musl"}, f"beside crates there is {others}")
    r.require("serialNumber" not in sbom and "timestamp" not in sbom["metadata"], "it differs from run to run")
