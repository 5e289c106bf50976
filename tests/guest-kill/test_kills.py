"""Tests kill -9 and a restart of vshunt under a real guest: the guest only pauses.

QEMU keeps the in-flight region and reconnects. The guest's fio verifies its writes meanwhile.
Afterwards the guest's kernel has logged no error, and the image is clean.
"""

import random
import time

import rig as r
import vm

KILLS = 10
# The length of a round of fio.
ROUND_S = 10
QUEUES = 4
SEED = 3

JOB = f"""
{vm.FILE_SYSTEM}
{vm.fio_rounds(ROUND_S)}
{vm.SUM_AGAIN}
"""


def connected(daemon):
    exports = daemon.status()["exports"]
    return bool(exports) and exports[0]["connected"]


def requests(daemon):
    return sum(q["requests"] for q in daemon.status()["queues"])


def test_ten_kills_under_fio_with_verification(rig):
    image = rig.image("kill.img")
    daemon, socket = vm.disk_daemon(rig, image, QUEUES, workers=2, name="kill")
    guest = vm.Guest(rig, socket, JOB, queues=QUEUES, reconnect=True, name="guest-kill")
    guest.expect("fio-start")
    chance = random.Random(SEED)
    begin = time.monotonic()
    for kill in range(KILLS):
        time.sleep(chance.uniform(1.5, 3.0))
        r.wait_for(f"requests before kill {kill + 1}", lambda: requests(daemon) > 0)
        daemon.child.kill()
        time.sleep(chance.uniform(0.0, 0.8))
        daemon.start()
        r.wait_for("QEMU connects again", lambda: connected(daemon))
        r.wait_for("requests after the restart", lambda: requests(daemon) > 0)
    rig.say(f"{KILLS} kills in {time.monotonic() - begin:.0f} s")
    r.require(guest.said("fio") is None, f"fio failed before {KILLS} kills were made: {guest.tail()}")
    vm.stop_fio(guest, ROUND_S)
    vm.end_of_disk(guest, daemon)
    vm.check_image(rig, image, vm.same_sum(guest))
