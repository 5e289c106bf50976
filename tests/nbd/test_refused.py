"""Disks that cannot be had: one sentence names the thing and the remedy."""

import nbd_servers as n
import pytest
import rig as r

KEYS = (
    ("name=d0,format=nbd", ("needs a server", "uri=nbd://")),
    ("name=d0,format=nbd,file=/x", ("leave out file=",)),
    ("name=d0,file=nbd://h/x", ("is no file", "uri=nbd://h/x")),
    ("name=d0,uri=nbd://h/x,size=1M", ("leave out size",)),
    ("name=d0,uri=nbd://h/x,direct=on", ("direct=on",)),
    ("name=d0,uri=nbds://h/x?tls-psk-file=/k", ("by certificates only",)),
    ("name=d0,uri=nbd://h:x/", ("where a port should be",)),
    ("name=d0,uri=nbd+unix:///x", ("names no socket",)),
    ("name=d0,uri=nbd://h/x,reconnect-delay=86401", ("reconnect-delay", "86400")),
    ("name=d0,format=ram,size=1M,reconnect-delay=1", ("reconnect-delay", "format=nbd")),
    ("name=d0,format=ram,size=1M,uri=nbd://h/", ("uri", "format=nbd")),
    # No name service is asked: a label has 63 bytes at most.
    (f"name=d0,uri=nbd://{'h' * 64}/", ("no host hhhh",)),
)


@pytest.mark.parametrize("disk,words", KEYS, ids=lambda v: v if isinstance(v, str) else "")
def test_keys(rig, disk, words):
    n.refused(rig, disk, *words)


def test_nothing_listens(rig):
    n.refused(rig, f"name=d0,uri=nbd://127.0.0.1:{n.free_port()}/", "refuses the connection")
    n.refused(rig, f"name=d0,uri=nbd+unix:///?socket={rig.dir}/none.sock", "does not exist")


def test_exports_that_are_no_disk(rig):
    server = n.qemu_nbd(rig, rig.image("r.img", n.SIZE), "-r", export="right", name="r")
    n.refused(rig, n.disk(server, "wrong"), "no export named \"wrong\"", "\"right\"")
    n.refused(rig, n.disk(server, "right"), "read-only", "readonly=on")
    daemon = n.serve(rig, (server, "right"), name="of-r", readonly="on")
    reads = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / "vm0.sock", "--rw", "randread", "--size", "1M", "--quiet"]
    r.run(reads)
    r.require(daemon.child.stop() == 0, f"vshunt ended: {daemon.child.tail()}")
    odd = n.nbdkit(rig, "memory", "1000000", name="odd")
    n.refused(rig, n.disk(odd), "1000000 bytes", "not a multiple of 512")
    sizes = ("blocksize-minimum=4K", "blocksize-preferred=4K", "blocksize-maximum=64K")
    uneven = n.nbdkit(rig, "--filter=blocksize-policy", "memory", str(n.SIZE + 512), *sizes, name="uneven")
    n.refused(rig, n.disk(uneven), "blocks of 4096 bytes", "--filter=truncate")
    sizes = ("blocksize-minimum=64K", "blocksize-preferred=64K", "blocksize-maximum=64K")
    coarse = n.nbdkit(rig, "--filter=blocksize-policy", "memory", str(n.SIZE), *sizes, name="coarse")
    n.refused(rig, n.disk(coarse), "blocks of 65536 bytes")


HANDSHAKES = (
    ("greet-magic", "does not begin as an NBD server"),
    ("option-tls", "requires TLS"),
    ("option-long", "too long"),
    ("option-blocks", "block sizes"),
    ("read-only", "readonly=on"),
    ("greet-hang", "does not answer in time"),
)


@pytest.mark.parametrize("way,words", HANDSHAKES, ids=lambda v: v if "-" in v and " " not in v else "")
def test_handshakes_that_fail(rig, way, words):
    server = n.liar(rig, way, name=way)
    n.refused(rig, n.disk(server), words)
    server.kill()


def test_open_timeout_waits_for_the_server(rig):
    r.tool("nbdkit", "nbdkit")
    socket = rig.dir / "late.sock"
    disk = f"name=d0,uri=nbd+unix:///?socket={socket},open-timeout=60"
    argv = [r.binary("vshunt"), "serve", "--disk", disk, "--export", n.export(rig), "--control", rig.dir / "late.ctl"]
    daemon = r.Child(rig, "late-daemon", argv)
    server = n.nbdkit(rig, "memory", str(n.SIZE), name="late")
    r.wait_for("the daemon answers", lambda: (rig.dir / "late.ctl").exists() and daemon.running())
    r.require(daemon.stop() == 0, f"vshunt ended with {daemon.process.returncode}: {daemon.tail()}")
    server.kill()
