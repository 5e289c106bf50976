"""Tests kill -9 of vshunt, ten times, during verified writes: no completed write is lost.

vshunt-bench keeps the in-flight region as a VMM does, reconnects, and at the end reads everything
that it wrote. The cases are split and packed virtqueues, a file on the disk and one in memory,
thin disks whose map is restored from its journal, and queues that move between the kills.
"""

import random
import time
from pathlib import Path

import pytest
import rig as r

pytestmark = pytest.mark.slow

KILLS = 10
QUEUES = 4
SEED = 5


def killed(rig, packed, folder, thin=None):
    """`thin`: options of the qcow2 image, for a disk that is one."""
    name = "packed" if packed else "split"
    image = rig.image(f"{name}.img", 256 << 20, folder)
    if thin is not None:
        image.unlink()
        options = ["-o", thin] if thin else []
        r.run([r.binary("vshunt"), "image", "create", "-q", "-f", "qcow2", *options, image, "256M"])
    keys = "" if thin is None else ",format=qcow2"
    socket = rig.dir / f"{name}.sock"
    daemon = r.Daemon(
        rig,
        *("--disk", f"name=d0,file={image}{keys}"),
        *("--export", f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket},queues={QUEUES},workers=2"),
        name=name,
    )
    load = r.Child(
        rig,
        f"load-{name}",
        [
            *(r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", "randwrite", "--verify", "--bs", "4k"),
            *("--queues", QUEUES, "--iodepth", "32", "--reconnect", "120s", "--stall", "120s", "--runtime", r.FOREVER, "--flush-every", "64"),
            *("--seed", SEED, "--quiet", *(("--packed",) if packed else ())),
        ],
    )
    chance = random.Random(SEED)

    def requests():
        r.require(load.running(), f"vshunt-bench ended with {load.process.returncode}: {load.tail()}")
        return sum(q["requests"] for q in daemon.status()["queues"])

    for kill in range(KILLS):
        r.wait_for(f"requests before kill {kill + 1}", requests)
        daemon.attach(f"vm0:{chance.randrange(QUEUES)}", 0)
        time.sleep(chance.uniform(0.1, 0.8))
        daemon.child.kill()
        time.sleep(chance.uniform(0.0, 0.4))
        daemon.start()
    # What came after the last one is verified, too.
    r.wait_for("requests after the last kill", lambda: requests() > 1000)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    r.require(daemon.child.stop() == 0, f"vshunt ended with {daemon.child.process.returncode}: {daemon.child.tail()}")
    if thin is not None:
        done = r.run([r.binary("vshunt"), "image", "check", image], check=False)
        r.require(done.returncode == 0, f"the image was closed: {done.stdout}{done.stderr}")
        info = image.stat()
        left = list(Path("/dev/shm").glob(f"vshunt-map-{info.st_dev:x}-{info.st_ino:x}*"))
        r.require(not left, f"{left} are left behind")
    image.unlink()


def test_split_on_a_disk(rig):
    killed(rig, False, rig.dir)


def test_packed_in_memory(rig, memory):
    killed(rig, True, memory)


@pytest.mark.parametrize("options", ("", "cluster_size=4k", "extended_l2=on,lazy_refcounts=on"), ids=lambda o: o or "plain")
def test_thin_disk(rig, options):
    killed(rig, False, rig.dir, options)


def test_thin_disk_in_memory(rig, memory):
    killed(rig, True, memory, "")
