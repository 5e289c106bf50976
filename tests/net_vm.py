"""A real guest on our card: iperf3 both ways with the host while pairs come and go, queues are moved, and vshunt is killed."""

import random
import re
import time

import net_rig as n
import rig as r
import vm

PAIRS = 4
MOVES, KILLS = 40, 3
# Of a round of iperf3.
ROUND_S = 6
SEED = 29


# With `$own`, the guest's address: its card, and what it says of it.
CARD = """
ip link set lo up
ip addr add $own/24 dev eth0
ip link set eth0 up
say queues $(ls /sys/class/net/eth0/queues | wc -w) $(cat /sys/class/net/eth0/mtu) $(cat /sys/class/net/eth0/address)
ethtool -k eth0 | sed 's/^[[:space:]]*//' | while read -r line; do say offload $line; done
"""

# With `$server`, who answers iperf3.
ROUNDS = f"""
changes() {{ cat /sys/class/net/eth0/carrier_changes; }}
# Until the rig says the word: rounds of iperf3; `$1`: what is done beside.
rounds() {{
    rm -f /tmp/told
    say begin-$2 $(changes)
    (read -r word </dev/ttyS1; echo "$word" >/tmp/told) &
    ($1) &
    rc=0 count=0
    while [ $rc = 0 ] && [ ! -s /tmp/told ]; do
        iperf3 -c $server --bidir -P 4 -t {ROUND_S} -i 2 >/tmp/iperf 2>&1
        rc=$?
        count=$((count + 1))
        grep -E '^.SUM.*sec|error' /tmp/iperf | while read -r line; do say iperf-$2 $line; done
    done
    say end-$2 $rc $(changes)
}}
"""

JOB = f"""
own=10.9.0.2 server=10.9.0.1
{CARD}{ROUNDS}
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


def reports(guest, word):
    """Bytes a second of iperf3's intervals, by direction, and its errors."""
    rates = {"TX-C": [], "RX-C": []}
    for line in guest.lines():
        if not line.startswith(f"iperf-{word} "):
            continue
        r.require("error" not in line, line)
        found = re.search(r"SUM\]\[(.X-C)\].*sec +[\d.]+ \w+ +([\d.]+) (\w?)bits/sec", line)
        if found and "sender" not in line and "receiver" not in line:
            rates[found[1]].append(float(found[2]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[found[3]] / 8)
    return rates


def check_rates(rig, guest, word, stalls):
    rates = reports(guest, word)
    for way, seen in rates.items():
        r.require(seen, f"iperf3 says nothing of {way}: {guest.tail()}")
        zero = sum(rate == 0 for rate in seen)
        r.require(zero <= stalls, f"{way} stood still in {zero} of {len(seen)} intervals: {seen}")
        rig.say(f"{word}: {way} {min(seen) / 1e6:.0f} to {max(seen) / 1e6:.0f} MB/s in {len(seen)} intervals")


def guest(rig):
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
    check_offloads(guest)
    moves(rig, daemon, guest)
    kills(rig, daemon, guest)
    guest.end()
    states = {index: q["state"] for index, q in daemon.queues().items()}
    r.require("broken" not in states.values(), f"{states}: {daemon.child.tail()}")
    code = daemon.child.stop()
    r.require(code == 0, f"vshunt ended with {code}: {daemon.child.tail()}")


def check_offloads(guest):
    on = {line for line in guest.lines() if line.startswith("offload ") and line.endswith((": on", ": on [fixed]"))}
    for offload in ("tx-checksum-ip-generic", "tx-tcp-segmentation", "tx-tcp6-segmentation", "rx-checksumming"):
        r.require(any(f" {offload}:" in line for line in on), f"{offload} is not on: {on}")


def running(guest, word):
    r.require(guest.said(f"end-{word}") is None, f"iperf3 ended before it was told to: {guest.tail()}")


def moves(rig, daemon, guest):
    """Pairs come and go in the guest, queues and workers here."""
    carrier = guest.expect("begin-moves")
    chance = random.Random(SEED)
    more = [daemon.worker_new() for _ in range(2)]
    first = sorted({q["worker"] for q in daemon.queues().values()} - set(more))
    before = daemon.counters()
    pause = r.Pace(MOVES, 1.5 * ROUND_S)
    for move in range(MOVES):
        daemon.cli("attach", f"c0:{chance.randrange(PAIRS)}", chance.choice([*first, *more]))
        if move % 10 == 9:
            at = {q["worker"] for q in daemon.queues().values()}
            for worker in [w for w in more if w not in at]:
                daemon.cli("worker", "free", worker)
                more.remove(worker)
            more.append(daemon.worker_new())
        pause.wait()
    running(guest, "moves")
    after = daemon.counters()
    for index in range(PAIRS):
        for way in ("to-guest-packets", "from-guest-packets"):
            r.require(after[index][way] > before[index][way], f"pair {index}: {way} stands at {after[index][way]}")
    guest.tell("stop")
    end = guest.expect("end-moves", ROUND_S + vm.BOOT_S)
    r.require(end == f"0 {carrier}", f"iperf3's code and changes of the carrier: {end}; the latter were {carrier}")
    turns = guest.expect("switched")
    r.require(guest.said("cannot-switch") is None, f"ethtool -L failed: {guest.tail()}")
    rig.say(f"{MOVES} moves, {turns} times ethtool -L; drops {daemon.drops()}")
    check_rates(rig, guest, "moves", stalls=0)


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
    running(guest, "kills")
    guest.tell("stop")
    end = guest.expect("end-kills", ROUND_S + vm.BOOT_S)
    r.require(end.startswith("0 "), f"iperf3 ended with {end}: {guest.tail()}")
    # An interval in which it was killed may have been nothing but waiting for the guest's TCP to try again.
    check_rates(rig, guest, "kills", stalls=2 * KILLS)


def tests(rig):
    name = f"net: a guest's iperf3, ethtool -L, {MOVES} moves, {KILLS} times kill -9"
    rig.test(name, lambda: guest(rig))
