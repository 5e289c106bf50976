"""The RPM package: compared with the Debian one, installed into an empty root, and used in a booted root."""

import re

import pytest
import rig as r
from debian_root import Root
from installed import BENCH, CONFIG

# Of the Debian package alone: AppArmor, and what Debian's policy asks for.
ONLY_DEB = {"/etc/apparmor.d/vshunt", *(f"/usr/share/doc/vshunt/{name}" for name in ("copyright", "changelog.gz", "changelog.Debian.gz"))}
ONLY_RPM = {"/usr/share/licenses/vshunt/LICENSE-APACHE", "/usr/share/licenses/vshunt/LICENSE-MIT", "/usr/share/doc/vshunt/CHANGELOG.md"}


@pytest.fixture(scope="module")
def package(rpms):
    (found,) = rpms.glob("vshunt-*.rpm")
    return found


def test_has_the_files_of_the_debian_package(package, debs):
    listed = r.run(["rpm", "-qp", "--qf", "[%{FILEMODES:perms} %{FILENAMES}\n]", package]).stdout
    ours = {line.split(maxsplit=1)[1] for line in listed.splitlines() if not line.startswith("d")}
    (deb,) = debs.glob("vshunt_*.deb")
    theirs = set()
    for line in r.run(["dpkg-deb", "-c", deb]).stdout.splitlines():
        mode, _, _, _, _, path = line.split(maxsplit=5)
        if not mode.startswith("d"):
            theirs.add(re.sub(r"^\.(/lib/)?", lambda m: "/usr/lib/" if m[1] else "", path.split(" -> ")[0]))
    r.require(ours - ONLY_RPM == theirs - ONLY_DEB, f"not in both: {sorted((ours - ONLY_RPM) ^ (theirs - ONLY_DEB))}")
    r.require(ONLY_RPM <= ours, f"missing: {ONLY_RPM - ours}")


def test_version_and_needs(package):
    version = re.search(r'^version = "(.*)"', (r.ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    seen = r.run(["rpm", "-qp", "--qf", "%{VERSION}-%{RELEASE} %{LICENSE}", package]).stdout
    r.require(seen == f"{version}-1 Apache-2.0 OR MIT", f"the package is {seen}")
    needs = r.run(["rpm", "-qp", "--requires", package]).stdout
    r.require("libc.so.6(GLIBC_" in needs and "systemd" in needs, f"it needs {needs}")


def test_built_twice(package, again):
    """The package of the same programs is the same bytes, in any folder and with any settings of the user."""
    made = again("rpm") / package.name
    r.require(package.read_bytes() == made.read_bytes(), "the two differ")


def test_installed_into_an_empty_root(rig, package):
    root = rig.dir / "empty"
    root.mkdir()
    # There is no shell for scripts, and nothing that it depends on.
    r.run(["rpm", "--root", root, "-i", "--nodeps", "--noscripts", package])
    r.run(["rpm", "--root", root, "-V", "--nodeps", "--noscripts", "vshunt"])
    (root / "usr/bin/vshunt-bench").write_bytes(b"other")
    done = r.run(["rpm", "--root", root, "-V", "--nodeps", "--noscripts", "vshunt"], check=False)
    r.require("/usr/bin/vshunt-bench" in done.stdout, f"`rpm -V` does not see a change: {done.stdout}")
    r.run(["rpm", "--root", root, "-e", "--noscripts", "vshunt"])
    left = [path for path in root.rglob("*") if path.is_file() and "rpm" not in str(path.relative_to(root))]
    r.require(not left, f"left behind: {left}")


def test_installed_used_upgraded_removed(rig, package):
    """Scripts of the package make the user and the folders, its units start, and nothing runs after its removal. The root is a Debian
    one with rpm: no mirror of a distribution with RPM is configured here."""
    rpm = "rpm --nodeps"
    with Root(rig, "trixie") as root:
        root.put(package, "root/vshunt.rpm")
        root.outside("apt-get", "-q", "update")
        root.outside("apt-get", "-q", "-y", "--no-install-recommends", "install", "rpm")
        root.boot()
        root.shell(f"{rpm} -i /root/vshunt.rpm 2>&1; rpm -V --nodeps vshunt")
        root.shell("id -nG vshunt | grep -qw kvm; test -d /run/vshunt; test -d /var/lib/vshunt")
        root.write("etc/vshunt/web.toml", CONFIG)
        root.shell("vshunt image create -f qcow2 /var/lib/vshunt/d0.qcow2 64M; chown vshunt: /var/lib/vshunt/d0.qcow2")
        root.shell("systemctl start vshunt@web vshunt; vshunt status")
        # Root's service takes no image away from the instances.
        root.shell('test "$(stat -c %U /var/lib/vshunt /var/lib/vshunt/d0.qcow2 | sort -u)" = vshunt')
        root.shell(BENCH.format("/run/vshunt/web/vm0.sock"))
        pids = [root.shell(f"systemctl show -P MainPID {unit}").strip() for unit in ("vshunt", "vshunt@web")]
        root.shell(f"echo '# mine' >>/etc/vshunt/vshunt.toml; {rpm} -U --replacepkgs /root/vshunt.rpm 2>&1")
        after = [root.shell(f"systemctl show -P MainPID {unit}").strip() for unit in ("vshunt", "vshunt@web")]
        r.require(after[0] not in ("0", pids[0]) and after[1] == pids[1], f"the daemons were {pids}, and are {after}")
        root.shell(f"grep -q '# mine' /etc/vshunt/vshunt.toml; {rpm} -e vshunt 2>&1")
        r.require(root.inside("pgrep", "-x", "vshunt", check=False).returncode, "a daemon runs although the package is gone")
        root.shell("! test -e /usr/bin/vshunt; grep -q '# mine' /etc/vshunt/vshunt.toml.rpmsave; test -e /var/lib/vshunt/d0.qcow2")
