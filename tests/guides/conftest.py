"""A booted Debian 12 for all pages, with what their readers have: the package, QEMU, libvirt, and a disk image that boots."""

import os

import guide_guest
import pytest
import rig as r
from debian_root import Root, devices

SUITE = "bookworm"
PACKAGES = ("qemu-system-x86", "libvirt-daemon-system", "libvirt-clients", "virtinst", "iproute2", "socat")
@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """The package of the programs that are tested."""
    for program, name in (("dpkg-buildpackage", "dpkg-dev"), ("dh", "debhelper"), ("dh_apparmor", "dh-apparmor")):
        r.tool(program, name)
    folder = tmp_path_factory.mktemp("package")
    env = {**os.environ, "VSHUNT_BIN": os.path.dirname(r.binary("vshunt")), "CARGO_TARGET_DIR": str(folder)}
    r.run([r.ROOT / "scripts/deb", "--no-lint"], timeout_s=600, env=env)
    (made,) = folder.glob("deb/vshunt_*.deb")
    return made


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """A disk image that boots, which nobody may write."""
    rig = r.Rig("guide-image", signals=False)
    made = guide_guest.bootable(rig, tmp_path_factory.mktemp("image") / "disk.img")
    rig.end()
    return made


@pytest.fixture(scope="session")
def booted(package, image, request):
    """The root, with the image in /root/disk.img. It is one for all pages: each ends what it has started."""
    failed = request.session.testsfailed
    rig = r.Rig("guides", signals=False)
    with Root(rig, SUITE, PACKAGES) as root:
        root.put(package, "root/vshunt.deb")
        root.outside("dpkg", "-i", "/root/vshunt.deb")
        r.run(["cp", "--sparse=always", image, root.path / "root/disk.img"])
        guide_guest.with_qemu(root)
        root.boot(*devices())
        yield root
        root.kill()
    rig.end(keep=request.session.testsfailed > failed)
