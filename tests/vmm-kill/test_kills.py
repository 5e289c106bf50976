"""Tests kill -9 of QEMU under I/O, and its restart on the same vshunt: the image is intact.

The export accepts the new front end. The next guest finds the data that the one before synced. It
replays the journal of its file system as after a power failure, runs fio with verification and is
killed in turn. The last one powers off. The guests use split and packed virtqueues in turn.
"""

import random
import time

import rig as r
import vm

KILLS = 2
SECONDS = 8
QUEUES = 4
SEED = 7

MAKE = vm.FILE_SYSTEM
AGAIN = """
mount -t ext4 /dev/vda /mnt && say mounted
say sum $(sha256sum /mnt/sum)
"""
END = """
umount /mnt && say unmounted
"""


def state(daemon):
    """Whether a front end is connected, and what runs or is in flight."""
    status = daemon.status()
    busy = [q for q in status["queues"] if q["state"] != "stopped" or q["in-flight"]]
    return status["exports"][0]["connected"], busy


def under_load(rig, daemon, socket, boot, sha):
    """A guest that runs fio, and the checksum of the file on its disk. `sha`: what it has to be, if one is known."""
    # A guest that is to be killed runs until then.
    job = f"{AGAIN if boot else MAKE}\n{vm.fio_job(SECONDS if boot == KILLS else 600)}{END}"
    guest = vm.Guest(rig, socket, job, queues=QUEUES, packed=boot % 2 == 1, name=f"guest-vmm{boot}")
    guest.expect("mounted")
    seen = guest.expect("sum").split()[0]
    r.require(sha in (None, seen), f"boot {boot + 1} reads a file with sha256 {seen}, synced was {sha}")
    guest.expect("fio-start")

    def requests():
        return sum(q["requests"] for q in daemon.status()["queues"])

    before = requests()
    # An emulated guest on a loaded machine takes its time to start fio.
    r.wait_for(f"requests of boot {boot + 1}", lambda: requests() > before, 120)
    return guest, seen


def test_two_kills_of_qemu_under_fio_and_another_qemu_on_the_same_export(rig):
    image = rig.image("vmm.img")
    daemon, socket = vm.disk_daemon(rig, image, QUEUES, workers=2, name="vmm")
    chance = random.Random(SEED)
    sha = None
    for boot in range(KILLS):
        guest, sha = under_load(rig, daemon, socket, boot, sha)
        time.sleep(chance.uniform(2.0, 4.0))
        r.require(guest.said("fio") is None, f"fio ended before the kill: {guest.tail()}")
        daemon.attach(f"vm0:{chance.randrange(QUEUES)}", chance.choice([0, 1, 2]))
        guest.child.kill()
        r.wait_for("the end of the front end is seen, and nothing is in flight", lambda: state(daemon) == (False, []))
        r.require(daemon.child.running(), f"vshunt ended with QEMU: {daemon.child.tail()}")
    guest, sha = under_load(rig, daemon, socket, KILLS, sha)
    r.require(guest.expect("fio", SECONDS + vm.BOOT_S) == "0", f"fio failed in the guest: {guest.tail()}")
    vm.end_of_disk(guest, daemon)
    vm.check_image(rig, image, sha)
