"""iperf3 in real guests, and checks of its rates. For tests in tests/net."""

import re

import rig as r
from rates import needs_cpu

# Seconds of a round of iperf3.
ROUND_S = 6

# Sets the guest's device up with the address `$own`, and reports its queues and offloads.
NIC = """
ip link set lo up
ip addr add $own/24 dev eth0
ip link set eth0 up
say queues $(ls /sys/class/net/eth0/queues | wc -w) $(cat /sys/class/net/eth0/mtu) $(cat /sys/class/net/eth0/address)
ethtool -k eth0 | sed 's/^[[:space:]]*//' | while read -r line; do say offload $line; done
"""

# Rounds of iperf3 with `$server`.
ROUNDS = f"""
changes() {{ cat /sys/class/net/eth0/carrier_changes; }}
# Rounds of iperf3 until a word comes from the test. `$1` runs meanwhile.
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
        needs_cpu(zero <= stalls, f"{way} stood still in {zero} of {len(seen)} intervals: {seen}")
        rig.say(f"{word}: {way} {min(seen) / 1e6:.0f} to {max(seen) / 1e6:.0f} MB/s in {len(seen)} intervals")


def check_offloads(guest):
    on = {line for line in guest.lines() if line.startswith("offload ") and line.endswith((": on", ": on [fixed]"))}
    for offload in ("tx-checksum-ip-generic", "tx-tcp-segmentation", "tx-tcp6-segmentation", "rx-checksumming"):
        r.require(any(f" {offload}:" in line for line in on), f"{offload} is not on: {on}")


def running(guest, word):
    r.require(guest.said(f"end-{word}") is None, f"iperf3 ended before it was told to: {guest.tail()}")
