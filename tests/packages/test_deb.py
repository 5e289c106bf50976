"""The Debian packages: built, checked by lintian, installed, used, upgraded, removed and purged in booted roots of Debian 12 and 13."""

import re
import shutil

import pytest
import rig as r
from debian_root import Root, versions
from installed import BENCH, CONFIG

SUITES = ("bookworm", "trixie")


@pytest.fixture(scope="module")
def packages(debs):
    return debs


def package(packages, name):
    found = list(packages.glob(f"{name}_*.deb"))
    r.require(len(found) == 1, f"not one package {name}: {found}")
    return found[0]


def test_packages_are_whole(packages):
    """What users look for is in the packages."""
    listed = r.run(["dpkg-deb", "-c", package(packages, "vshunt")]).stdout
    for place in (
        *("/usr/bin/vshunt", "/usr/bin/vshunt-bench", "/usr/libexec/vshunt-blk", "/usr/share/man/man1/vshunt-serve.1.gz"),
        *("/usr/share/man/man1/vshunt-bench-net.1.gz", "/usr/share/bash-completion/completions/vshunt", "/etc/vshunt/vshunt.toml"),
        *("/lib/systemd/system/vshunt@.service", "/lib/systemd/system/vshunt.service", "/lib/systemd/system/vshunt.socket"),
        *("/usr/lib/sysusers.d/vshunt.conf", "/usr/lib/tmpfiles.d/vshunt.conf", "/usr/lib/modules-load.d/vshunt.conf"),
        *("/etc/apparmor.d/vshunt", "/usr/share/qemu/vhost-user/50-vshunt-blk.json", "/usr/share/doc/vshunt/docs/guide/disks.md"),
    ):
        r.require(f".{place}\n" in listed or f".{place} ->" in listed, f"{place} is missing")
    listed = r.run(["dpkg-deb", "-c", package(packages, "vhost-blk-dkms")]).stdout
    r.require("/dkms.conf\n" in listed and "60-vhost-blk.rules\n" in listed, listed)


def test_built_twice(packages, again):
    """Packages of the same programs are the same bytes, in any folder and with any settings of the user."""
    made = again("deb")
    for one in packages.glob("*.deb"):
        r.require(one.read_bytes() == (made / one.name).read_bytes(), f"{one.name} differs")


def test_apparmor_profile_is_valid():
    """The profile is read by AppArmor's parser. Whether this kernel has AppArmor does not matter."""
    parser = r.tool("apparmor_parser", "apparmor")
    r.run([parser, "--skip-kernel-load", "--skip-cache", r.ROOT / "packaging/apparmor/vshunt"])


def newer(rig, packages):
    """The same package, with a higher version."""
    old, tree = package(packages, "vshunt"), rig.dir / "newer"
    shutil.rmtree(tree, ignore_errors=True)
    r.run(["dpkg-deb", "-R", old, tree])
    control = tree / "DEBIAN/control"
    version = versions(old)["Version"]
    control.write_text(control.read_text(encoding="utf-8").replace(f"Version: {version}", f"Version: {version}+1"), encoding="utf-8")
    r.run(["dpkg-deb", "--root-owner-group", "-b", tree, rig.dir / "newer.deb"])
    return rig.dir / "newer.deb"


def pid_of(root, unit):
    return root.inside("systemctl", "show", "-P", "MainPID", unit).stdout.strip()


def is_active(root, unit):
    return root.inside("systemctl", "is-active", unit, check=False).stdout.strip() == "active"


@pytest.mark.parametrize("suite", SUITES)
def test_installed_used_upgraded_removed_purged(rig, packages, suite):
    with Root(rig, suite) as root:
        root.put(package(packages, "vshunt"), "root/vshunt.deb")
        root.put(newer(rig, packages), "root/newer.deb")
        root.outside("apt-get", "-q", "update")
        root.outside("apt-get", "-q", "-y", "--no-install-recommends", "install", "/root/vshunt.deb")
        root.boot()
        root.shell("id -nG vshunt | grep -qw kvm; test -d /run/vshunt; test -d /var/lib/vshunt")
        used_by_hand(root)
        used_as_service(root)
        upgraded(root)
        removed(root)


def used_by_hand(root):
    """`vshunt serve FILE` needs no configuration, and no service runs beside it."""
    root.shell("vshunt image create -f qcow2 /root/disk.qcow2 64M")
    root.shell("systemd-run -q --unit=hand --service-type=notify vshunt serve /root/disk.qcow2")
    found = root.shell("vshunt status")
    socket = re.search(r"/run/vshunt/\S+\.sock", found)
    r.require(socket, f"status names no socket in /run/vshunt: {found}")
    root.shell(BENCH.format(socket[0]))
    root.shell("systemctl stop hand; vshunt image check /root/disk.qcow2")


def used_as_service(root):
    """vshunt@NAME serves /etc/vshunt/NAME.toml as the user vshunt; vshunt.service has nothing configured, and runs."""
    root.write("etc/vshunt/web.toml", CONFIG)
    root.shell("setpriv --reuid=vshunt --regid=vshunt --clear-groups vshunt image create -f qcow2 /var/lib/vshunt/d0.qcow2 64M")
    root.shell("systemctl enable --now vshunt@web")
    pid = pid_of(root, "vshunt@web")
    user = root.shell(f"stat -c %U /proc/{pid}").strip()
    r.require(user == "vshunt", f"the service runs as {user}")
    root.shell(BENCH.format("/run/vshunt/web/vm0.sock"))
    shown = root.shell("vshunt -c /run/vshunt/web/control.sock status")
    r.require("vm0" in shown, shown)
    log = root.shell("journalctl -u vshunt@web -o cat")
    r.require("serving vm0 on /run/vshunt/web/vm0.sock" in log, f"the journal has: {log}")
    # A restart by itself after a kill.
    root.shell(f"kill -9 {pid}")
    r.wait_for("the killed service is there again", lambda: is_active(root, "vshunt@web") and pid_of(root, "vshunt@web") != pid)
    root.shell("systemctl start vshunt; vshunt status; systemctl is-active vshunt")


def upgraded(root):
    """An upgrade restarts the service, and leaves instances and configuration as they are."""
    before = pid_of(root, "vshunt"), pid_of(root, "vshunt@web")
    root.shell("echo '# mine' >>/etc/vshunt/vshunt.toml; dpkg -i --force-confold /root/newer.deb 2>&1", timeout_s=300)
    after = pid_of(root, "vshunt"), pid_of(root, "vshunt@web")
    r.require(after[0] not in ("0", before[0]), "the service was not restarted")
    r.require(after[1] == before[1], "an instance was restarted under its guest")
    root.shell("grep -q '# mine' /etc/vshunt/vshunt.toml; vshunt status; systemctl restart vshunt@web; systemctl is-active vshunt@web")


def removed(root):
    """After `remove` nothing runs and the configuration stays; after `purge` that goes, and images stay."""
    root.shell("dpkg -r vshunt 2>&1", timeout_s=300)
    r.require(root.inside("pgrep", "-x", "vshunt", check=False).returncode, "a daemon runs although the package is gone")
    root.shell("test -e /etc/vshunt/vshunt.toml; ! test -e /usr/bin/vshunt")
    root.shell("dpkg -P vshunt 2>&1; ! test -e /etc/vshunt/vshunt.toml; ! test -e /etc/apparmor.d/vshunt; test -e /var/lib/vshunt/d0.qcow2")
