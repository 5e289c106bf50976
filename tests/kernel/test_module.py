"""Tests of the kernel module that need no VM.

The module builds. The struct layouts of the private header are those of the kernel. Checkers find
nothing. DKMS and the package accept the module.
"""

import os
import re
import shutil

import kernel_vm as k
import pytest
import rig as r

pytestmark = pytest.mark.timeout(1800)

CHECKS = {
    "struct-layouts-are-the-kernels": "check-layout",
    "ioctl-structs-are-the-same-in-rust-and-c": "check-uapi",
    "checkpatch": "check-style",
    "sparse": "check-sparse",
}


def test_it_builds_against_the_stock_headers(modules):
    r.require("vhost_blk" in modules.data, "the module is missing")


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_checker(modules, check):
    k.kernel(check)


def test_the_debian_package(rig, modules):
    """It is made, and has what DKMS builds."""
    r.run([r.tool("make", "make"), "-s", "-C", r.ROOT / "kmod", "deb", f"OUT={rig.dir}"], timeout_s=300)
    (package,) = rig.dir.glob("*.deb")
    listed = r.run([r.tool("dpkg-deb", "dpkg"), "--contents", package]).stdout
    for name in ("dkms.conf", "Kbuild", "ring.c", "include/uapi/linux/vhost_blk.h", "vhost-header"):
        r.require(re.search(rf"/usr/src/vhost-blk-[0-9.]+/{name}$", listed, re.M), f"it has no {name}")
    r.require("udev/rules.d/60-vhost-blk.rules" in listed, "it has no udev rule")


# Kernels that the module is not for, and some that it is for, as `uname -r` has them.
TOO_OLD = ("2.6.32-5-amd64", "4.19.0-27-amd64", "5.10.0-30-amd64", "6.1.0-44-amd64", "6.1.192", "6.6.15-amd64", "6.9.7", "6.11.10+bpo-amd64")
NEW_ENOUGH = ("6.12", "6.12.95+deb12-cloud-amd64", "6.13-rc1", "6.19.8", "6.20.1", "6.100.1", "7.0.1", "7.3.4+deb13-amd64", "10.0.1", "12.1")


def test_the_kernels_that_dkms_builds_it_for(modules):
    """Both lines of dkms.conf say the same: the regular expression, for Debian 12's dkms, and the version, for later ones."""
    conf = r.ROOT / "kmod/vhost_blk/dkms.conf"
    least = re.search(r'^BUILD_EXCLUSIVE_KERNEL_MIN="([0-9.]+)"$', conf.read_text(), re.M)[1]

    def number(release):
        return [int(n) for n in re.match(r"[0-9]+(\.[0-9]+)*", release)[0].split(".")]

    # As dkms does it.
    script = '. "$1"; [[ $2 =~ $BUILD_EXCLUSIVE_KERNEL ]]'
    for release in (*TOO_OLD, *NEW_ENOUGH):
        matches = r.run(["bash", "-c", script, "bash", conf, release], check=False).returncode == 0
        r.require(matches == (release in NEW_ENOUGH), f"the regular expression says {matches} of {release}")
        later = number(release) >= number(least)
        r.require(later == (release in NEW_ENOUGH), f"the least version says {later} of {release}")


def test_dkms_of_this_machine(rig, modules):
    """It leaves out kernels that are too old, and begins to build for others."""
    dkms = r.tool("dkms", "dkms")
    sources, tree, headers = (rig.dir / name for name in ("dkms-sources", "dkms-tree", "dkms-headers"))
    shutil.copytree(r.ROOT / "kmod/vhost_blk", sources / "vhost-blk-0.1.0")
    # Of no kernel: a build that begins fails.
    (headers / "include").mkdir(parents=True)
    tree.mkdir()
    excluded, failed = 77, 10
    for release, code in (("6.1.0-44-amd64", excluded), ("6.12.95+deb12-amd64", failed), ("7.3.4+deb13-amd64", failed)):
        argv = [dkms, "build", "-m", "vhost-blk", "-v", "0.1.0", "-k", release, "-a", "x86_64", "--kernelsourcedir", headers]
        # It signs nothing, so that it makes no key on this machine.
        environment = os.environ | {"sign_file": "/nonexistent"}
        done = r.run([*argv, "--dkmstree", tree, "--sourcetree", sources], check=False, env=environment)
        r.require(done.returncode == code, f"of {release} it says {done.returncode}: {done.stdout}{done.stderr}")


def test_a_field_more_in_vhost_h_is_found(rig, folder, modules):
    """By the check of layouts."""
    other = rig.dir / "vhost"
    other.mkdir()
    text = open(f"{folder}/vhost/vhost.h").read()
    r.require("struct vhost_virtqueue {" in text, "vhost.h has no struct vhost_virtqueue")
    (other / "vhost.h").write_text(text.replace("struct vhost_virtqueue {", "struct vhost_virtqueue {\n\tlong more;"))
    try:
        k.kernel("check-layout", VHOST_INC=str(other))
    except r.Failed as e:
        r.require("struct vhost_virtqueue" in str(e) and "the kernel's lies elsewhere" in str(e), f"failed otherwise: {e}")
    else:
        raise r.Failed("a field more in struct vhost_virtqueue went unnoticed")
