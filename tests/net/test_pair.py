"""Tests two real guests joined by a switch.

They run ping, and iperf3 in both directions with offloads, while queues move and vshunt is
killed. Metrics and `status` agree.
"""

import random
import re
import socket
import time

import net_guests
import net_iperf as v
import pytest
import rig as r
import vm

# The mark timed: iperf3 reports intervals in which nothing came.
pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timed, pytest.mark.usefixtures("guest_image")]

PAIRS = net_guests.PAIRS
MOVES = 20
SEED = 31
ADDRESSES = ("10.8.0.1", "10.8.0.2")
MACS = ("52:54:00:12:34:60", "52:54:00:12:34:61")

SERVER = f"""
own={ADDRESSES[0]}
{v.NIC}
iperf3 -s >/dev/null 2>&1 &
say up
read -r word </dev/ttyS1
"""

CLIENT = f"""
own={ADDRESSES[1]} server={ADDRESSES[0]}
{v.NIC}{v.ROUNDS}
say up
read -r word </dev/ttyS1
ping -c 3 -W 20 $server && ping -c 3 -W 20 -s 9000 $server && say pinged
rounds : moves
rounds : kill
"""


def queues(switch):
    """The pairs of both guests' NICs, by name."""
    pairs = (q for q in switch.daemon.status()["queues"] if "net" in q)
    return {f"{q['export']}:{q['index']}": q for q in pairs}


def totals(switch):
    """Packets and bytes that each guest got, of all its queues."""
    got = {}
    for q in queues(switch).values():
        packets, size = got.get(q["export"], (0, 0))
        got[q["export"]] = (packets + q["net"]["to-guest-packets"], size + q["net"]["to-guest-bytes"])
    return got


def scrape(path):
    """Metrics by name and labels."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(r.WAIT_S)
        s.connect(str(path))
        s.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        text = b"".join(iter(lambda: s.recv(65536), b"")).decode()
    r.require(text.startswith("HTTP/1.1 200 ") and text.endswith("# EOF\n"), text[:200])
    return dict(re.findall(r"^(\w+\{.*\}) (\S+)$", text, re.MULTILINE))


def check_metrics(switch, path):
    """Between two looks at `status`."""
    before, seen, after = queues(switch), scrape(path), queues(switch)
    for name, q in after.items():
        labels = f'{{export="{q["export"]}",queue="{q["index"]}"}}'
        for key in ("to-guest-packets", "to-guest-bytes", "from-guest-packets", "from-guest-bytes", "to-guest-batches"):
            value = int(seen[f"vshunt_queue_{key.replace('-', '_')}_total{labels}"])
            r.require(before[name]["net"][key] <= value <= q["net"][key], f"{name}: {key} is {value}, {before[name]} {q}")


def moves(rig, switch, client, metrics):
    carrier = client.expect("begin-moves")
    chance = random.Random(SEED)
    workers = sorted({q["worker"] for q in queues(switch).values()} | {0, switch.daemon.worker_new()})
    before = totals(switch)
    pause = r.Ticker(MOVES, 1.5 * v.ROUND_S)
    for move in range(MOVES):
        switch.daemon.cli("attach", f"e{chance.randrange(2)}:{chance.randrange(PAIRS)}", chance.choice(workers))
        if move % 5 == 4:
            check_metrics(switch, metrics)
        pause.wait()
    v.running(client, "moves")
    r.wait_for("frames for both", lambda: all(now[0] > before[name][0] + 100 for name, now in totals(switch).items()))
    for name, (packets, size) in totals(switch).items():
        packets, size = packets - before[name][0], size - before[name][1]
        rig.say(f"{name} got {packets} frames of {size // packets} bytes")
    client.tell("stop")
    end = client.expect("end-moves", v.ROUND_S + vm.BOOT_S)
    r.require(end == f"0 {carrier}", f"iperf3's code and changes of the carrier: {end}; the latter were {carrier}")
    v.check_rates(rig, client, "moves", stalls=0)


def kill(rig, switch, client):
    """kill -9 and start again; both QEMUs connect by themselves."""
    client.expect("begin-kill")
    time.sleep(random.Random(SEED).uniform(1.0, 2.0))
    switch.daemon.child.kill()
    switch.daemon.start()
    r.wait_for("frames for both after the kill", lambda: all(packets > 100 for packets, _ in totals(switch).values()))
    v.running(client, "kill")
    client.tell("stop")
    end = client.expect("end-kill", v.ROUND_S + vm.BOOT_S)
    r.require(end.startswith("0 "), f"iperf3 ended with {end}: {client.tail()}")
    v.check_rates(rig, client, "kill", stalls=2)


def test_ping_and_iperf3_while_queues_move_and_after_a_kill(rig):
    r.tool("iperf3", "iperf3")
    r.tool("ethtool", "ethtool")
    metrics = rig.dir / "pair.metrics"
    switch = net_guests.Switch(rig, "pair", more=("--metrics", f"unix:{metrics}"))
    guests = [
        vm.Guest(rig, path, job, queues=PAIRS, vcpus=2, memory_mib=512, reconnect=True, net=mac, name=f"guest-pair{i}")
        for i, (path, job, mac) in enumerate(zip(switch.sockets, (SERVER, CLIENT), MACS))
    ]
    server, client = guests
    for guest, mac in zip(guests, MACS):
        said = guest.expect("queues")
        r.require(said == f"{2 * PAIRS} 1500 {mac}", f"queues, MTU and address are {said}")
        guest.expect("up")
        v.check_offloads(guest)
    client.tell("go")
    client.expect("pinged")
    moves(rig, switch, client, metrics)
    kill(rig, switch, client)
    client.end()
    server.tell("stop")
    server.end()
    states = {name: q["state"] for name, q in queues(switch).items()}
    r.require("broken" not in states.values(), f"{states}: {switch.daemon.child.tail()}")
    switch.end()
