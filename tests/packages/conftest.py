"""Packages that several files test, made once of the programs that are tested."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import rig as r

BUILD_S = 900
# The static programs are built without optimisation, which takes a third of the time. These are
# cargo's names.
QUICK = {"CARGO_PROFILE_RELEASE_OPT_LEVEL": "0", "CARGO_PROFILE_RELEASE_LTO": "off", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "64"}


def build(script, folder, **more):
    """Runs a script that makes packages. -> the folder of the packages"""
    env = {**os.environ, **more}
    if script == "static":
        env |= {**QUICK, "OUT": str(folder / script)}
    else:
        env |= {"VSHUNT_BIN": os.path.dirname(r.binary("vshunt")), "CARGO_TARGET_DIR": str(folder)}
        # Most of the time would go into compressing.
        env["DPKG_DEB_COMPRESSOR_LEVEL"] = "1"
    r.run([r.ROOT / "scripts" / script], timeout_s=BUILD_S, env=env)
    return Path(folder) / script


@pytest.fixture(scope="session")
def folder():
    made = Path(tempfile.mkdtemp(prefix="vshunt-packages."))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def debs(folder):
    """The folder of the Debian packages. lintian has no error and no warning for them, or this fails."""
    for program, package in (("dpkg-buildpackage", "dpkg-dev"), ("dh", "debhelper"), ("dh_apparmor", "dh-apparmor"), ("lintian", "lintian")):
        r.tool(program, package)
    return build("deb", folder / "one")


@pytest.fixture(scope="session")
def rpms(folder):
    """The folder of the RPM package. rpmlint accepts it, or this fails."""
    for program, package in (("rpmbuild", "rpm"), ("rpmlint", "rpmlint")):
        r.tool(program, package)
    return build("rpm", folder / "one")


@pytest.fixture(scope="session")
def static(folder):
    """The folder of the static programs' tarball and its SBOM."""
    return build("static", folder / "one")


@pytest.fixture(scope="session")
def tree(folder, static):
    """The folder that the tarball has, unpacked."""
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    (tarball,) = static.glob("*.tar.gz")
    r.run(["tar", "-C", unpacked, "-xzf", tarball])
    (found,) = unpacked.iterdir()
    return found


@pytest.fixture
def again(folder):
    """Makes packages again, in a folder of another name, with another file mode mask and time zone. -> their folder"""

    def make(script):
        before = os.umask(0o077)
        try:
            return build(script, folder / "made again", TZ="Asia/Tokyo")
        finally:
            os.umask(before)

    return make
