"""Measured rates, on a machine that may stand still meanwhile."""

import time

import rig as r
import stalls


class Machine(stalls.Stalls):
    """Delays from which on a rate may be missed. A limit makes up for 50 ms."""

    LEAST_S = 0.03


_MACHINES = []


def close(what, found, wanted, percent, seconds=6):
    """Fails unless `found` is `wanted` within `percent` %. Left out if the machine gave no CPU in the last `seconds`."""
    if abs(found - wanted) <= wanted * percent / 100:
        return
    said = f"{what}: {found:.1f} instead of {wanted:.1f} within {percent} %"
    now = time.monotonic()
    stood = sum(machine.within(now - seconds, now) for machine in _MACHINES)
    if stood > seconds / 100:
        raise r.Skipped(f"{said}; the machine gave no CPU for {stood:.2f} s of {seconds} s")
    raise r.Failed(said)


def watch():
    """Has the machine watched from now on."""
    if not _MACHINES:
        _MACHINES.append(Machine())
