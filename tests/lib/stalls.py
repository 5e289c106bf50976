"""Measures pauses of the machine, which must not count as slowness of the programs under test."""

import os
import threading
import time


class Stalls:
    """Times at which this machine stood still.

    A control thread on each CPU, which only reads the clock, was late then.
    """

    SLEEP_S = 0.01
    # A delay of less is not noted.
    LEAST_S = 0.05

    def __init__(self):
        # Pairs of begin and end, on the monotonic clock. Control threads append to it.
        self.noted = []
        for cpu in os.sched_getaffinity(0):
            threading.Thread(target=self.watch, args=(cpu,), daemon=True).start()

    def watch(self, cpu):
        os.sched_setaffinity(0, {cpu})
        while True:
            due = time.monotonic() + self.SLEEP_S
            time.sleep(self.SLEEP_S)
            now = time.monotonic()
            if now - due >= self.LEAST_S:
                self.noted.append((due, now))

    def within(self, begin, end):
        """Seconds of stalls between two times. Overlapping stalls of two CPUs count once."""
        total, done = 0.0, begin
        for one, other in sorted(self.noted):
            first, last = max(one, done), min(other, end)
            if last > first:
                total, done = total + last - first, last
        return total
