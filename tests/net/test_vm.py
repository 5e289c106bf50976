"""Tests a real guest: iperf3 in both directions with the host.

Meanwhile pairs are enabled and disabled, queues move, and vshunt is killed.
"""

import random
import time

import net_iperf as v
import net_rig as n
import pytest
import rig as r
import vm

# The mark timed: iperf3 reports intervals in which nothing came.
pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timed, pytest.mark.usefixtures("guest_image")]

PAIRS = 4
MOVES, KILLS = 40, 3
SEED = 29


JOB = f"""
own=10.9.0.2 server=10.9.0.1
{v.NIC}{v.ROUNDS}
switch() {{
    turn=0
    while [ ! -s /tmp/told ]; do
        for pairs in 1 4 2 3; do
            ethtool -L eth0 combined $pairs || say cannot-switch $pairs
            turn=$((turn + 1))
            sleep 0.3
        done
    done
    say switched $turn
}}
ethtool -L eth0 combined 4 && say switched-to 4
rounds switch moves
sleep 0.5
ethtool -L eth0 combined 4
rounds : kills
"""


def test_iperf3_while_pairs_come_and_go_queues_move_and_after_kills(rig):
    iperf = r.tool("iperf3", "iperf3")
    r.tool("ethtool", "ethtool")
    n.ip("tuntap", "add", "dev", "vs0", "mode", "tap", "multi_queue", "vnet_hdr")
    n.ip("addr", "add", "10.9.0.1/24", "dev", "vs0")
    n.ip("link", "set", "vs0", "mtu", "1500", "up")
    try:
        with n.Net(rig, "vm", pairs=PAIRS, mtu=1500) as daemon:
            server = r.Child(rig, "iperf3", [iperf, "-s"])
            with_guest(rig, daemon)
            server.kill()
    finally:
        n.ip("link", "del", "vs0")


def with_guest(rig, daemon):
    guest = vm.Guest(rig, daemon.socket, JOB, queues=PAIRS, reconnect=True, net=n.MAC, name="guest-net")
    said = guest.expect("queues")
    r.require(said == f"{2 * PAIRS} 1500 {n.MAC}", f"queues, MTU and address are {said}")
    guest.expect("switched-to")
    v.check_offloads(guest)
    moves(rig, daemon, guest)
    kills(rig, daemon, guest)
    guest.end()
    states = {index: q["state"] for index, q in daemon.queues().items()}
    r.require("broken" not in states.values(), f"{states}: {daemon.child.tail()}")
    code = daemon.child.stop()
    r.require(code == 0, f"vshunt ended with {code}: {daemon.child.tail()}")


def moves(rig, daemon, guest):
    """Pairs come and go in the guest, queues and workers here."""
    carrier = guest.expect("begin-moves")
    chance = random.Random(SEED)
    more = [daemon.worker_new() for _ in range(2)]
    first = sorted({q["worker"] for q in daemon.queues().values()} - set(more))
    before = daemon.counters()
    pause = r.Ticker(MOVES, 1.5 * v.ROUND_S)
    for move in range(MOVES):
        daemon.cli("attach", f"c0:{chance.randrange(PAIRS)}", chance.choice([*first, *more]))
        if move % 10 == 9:
            at = {q["worker"] for q in daemon.queues().values()}
            for worker in [w for w in more if w not in at]:
                daemon.cli("worker", "free", worker)
                more.remove(worker)
            more.append(daemon.worker_new())
        pause.wait()
    v.running(guest, "moves")
    ways = "to-guest-packets", "from-guest-packets"

    def took_part(index):
        now = daemon.counters()[index]
        return all(now[way] > before[index][way] for way in ways)

    for index in range(PAIRS):
        r.wait_for(f"frames both ways on pair {index}", lambda index=index: took_part(index))
    guest.tell("stop")
    end = guest.expect("end-moves", v.ROUND_S + vm.BOOT_S)
    r.require(end == f"0 {carrier}", f"iperf3's code and changes of the carrier: {end}; the latter were {carrier}")
    turns = guest.expect("switched")
    r.require(guest.said("cannot-switch") is None, f"ethtool -L failed: {guest.tail()}")
    rig.say(f"{MOVES} moves, {turns} times ethtool -L; drops {daemon.drops()}")
    v.check_rates(rig, guest, "moves", stalls=0)


def kills(rig, daemon, guest):
    """kill -9 and start again; QEMU connects by itself."""
    guest.expect("begin-kills")
    chance = random.Random(SEED)
    for kill in range(KILLS):
        time.sleep(chance.uniform(1.0, 2.0))
        daemon.child.kill()
        daemon.start()

        def both_ways():
            nets = daemon.counters().values()
            return all(sum(c[way] for c in nets) > 100 for way in ("to-guest-packets", "from-guest-packets"))

        r.wait_for(f"frames go both ways after kill {kill + 1}", both_ways)
    v.running(guest, "kills")
    guest.tell("stop")
    end = guest.expect("end-kills", v.ROUND_S + vm.BOOT_S)
    r.require(end.startswith("0 "), f"iperf3 ended with {end}: {guest.tail()}")
    # An interval in which it was killed may have been nothing but waiting for the guest's TCP to
    # try again.
    v.check_rates(rig, guest, "kills", stalls=2 * KILLS)
