"""NBD exports: real clients, hostile ones, moves between workers."""

import nbd_exports as e
import nbd_tls
import pytest


@pytest.fixture(params=("raw", "memory", "qcow2", "ram"))
def kind(request):
    """A kind of disk."""
    return request.param


@pytest.fixture(scope="module")
def authority(rig):
    return nbd_tls.Authority(rig)


@pytest.fixture(params=("plain", "tls"))
def served(rig, request):
    """A daemon with a disk in memory and two workers, for clients that misbehave, without TLS and with. Its name is that of the test."""
    name = request.node.name.translate({ord(c): "-" for c in "[]/ "})[:60]
    disk = f"format=ram,size={e.SIZE}"
    if request.param == "tls":
        daemon = e.serve_tls(rig, request.getfixturevalue("authority"), disk, name=name, workers=2)
    else:
        daemon = e.serve(rig, disk, name=name, workers=2)
    yield daemon
    e.ends_well(daemon)
