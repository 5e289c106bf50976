"""Tests a real guest while its queues move: no data is lost or repeated.

The guest sees no error.

An unmodified QEMU boots a Debian kernel with vhost-user-blk-pci on four queues. The guest makes a
file system and runs fio with verification on all four queues. Meanwhile, queues move between
workers a hundred times. Then the disk grows while the guest uses it, the guest trims, unmounts
and powers off, and the image is checked from outside.
"""

import random

import pytest
import rig as r
import vm

MOVES = 100
MOVES_S = 20
# The length of a round of fio.
ROUND_S = 8
QUEUES = 4
SIZE = 1 << 30
GROWN = SIZE + (256 << 20)
SEED = 2

JOB = f"""
say disk $(cat /sys/block/vda/size) $(ls /sys/block/vda/mq | wc -w) $(cat /sys/block/vda/serial)
{vm.FILE_SYSTEM}
{vm.fio_rounds(ROUND_S)}
say resize-me
n=0
while [ "$(cat /sys/block/vda/size)" != {GROWN // 512} ] && [ $n -lt 900 ]; do sleep 0.1; n=$((n + 1)); done
say size $(cat /sys/block/vda/size)
fstrim /mnt && say trimmed
{vm.SUM_AGAIN}
"""


def move_queues(daemon):
    """Moves the queues of vm0 MOVES times in MOVES_S seconds; returns the worker of each queue."""
    chance = random.Random(SEED)
    workers = [0] + [daemon.worker_new("--name", f"w{n}") for n in (1, 2)]
    at = dict.fromkeys(range(QUEUES), 0)
    pause = r.Ticker(MOVES, MOVES_S)
    for move in range(MOVES):
        queue = chance.randrange(QUEUES)
        if move % 20 == 19:  # a worker without queues ends, and a new one starts
            for empty in [w for w in workers if w != 0 and w not in at.values()][:1]:
                daemon.cli("worker", "free", empty)
                workers.remove(empty)
            workers.append(daemon.worker_new())
        at[queue] = chance.choice([w for w in workers if w != at[queue]])
        daemon.attach(f"vm0:{queue}", at[queue])
        pause.wait()
    return at


def check_moved(daemon, at, packed):
    """All queues run, on the workers that they were moved to."""
    status = daemon.status()
    seen = {q["index"]: q["worker"] for q in status["queues"]}
    r.require(seen == at, f"status says that the queues are at {seen}, they were moved to {at}")
    moved = sum(q["generation"] for q in status["queues"])
    r.require(moved >= MOVES, f"{MOVES} moves were made, the generations add up to {moved}")
    for q in status["queues"]:
        r.require(q["state"] == "running" and q["requests"] > 0, f"queue {q['index']} did not take part: {q}")
        r.require(q["packed"] == packed, f"queue {q['index']} is packed={q['packed']}")


@pytest.mark.parametrize("layout", ("split", "packed"))
def test_moves_under_fio_then_resize_trim_power_off(rig, layout):
    packed = layout == "packed"
    image = rig.image(f"{layout}.img", SIZE)
    daemon, socket = vm.disk_daemon(rig, image, QUEUES, name=layout)
    guest = vm.Guest(rig, socket, JOB, queues=QUEUES, packed=packed, name=f"guest-{layout}")
    disk = guest.expect("disk")
    r.require(disk == f"{SIZE // 512} {QUEUES} d0", f"the guest sees a disk of sectors, queues, serial {disk!r}")
    guest.expect("fio-start")
    # An emulated guest on a loaded machine takes its time to start fio.
    r.wait_for("requests of each queue", lambda: all(q["requests"] for q in daemon.status()["queues"]), vm.BOOT_S)

    at = move_queues(daemon)
    r.require(guest.said("fio") is None, f"fio failed before {MOVES} moves were made: {guest.tail()}")
    check_moved(daemon, at, packed)

    vm.stop_fio(guest, ROUND_S)
    guest.expect("resize-me")
    daemon.cli("resize", "d0", str(GROWN))
    size = guest.expect("size")
    r.require(size == str(GROWN // 512), f"resized to {GROWN // 512} sectors, the guest sees {size}")
    guest.expect("trimmed")
    vm.end_of_disk(guest, daemon)
    r.require(image.stat().st_size == GROWN, f"the image has {image.stat().st_size} bytes, not {GROWN}")
    vm.check_image(rig, image, vm.same_sum(guest))
    image.unlink()
