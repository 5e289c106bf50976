"""Tests that change a setting of the machine, and all others: of this run, and of a second one beside it."""

import fcntl
import os

# Any user can open these folders, and nobody else locks them.
SETTINGS, GATE = "/proc/sys", "/proc/sys/kernel"


class Turn:
    """The right to run a test: beside others, or `alone`. One that wants to be alone waits for the tests under way, and later
    ones wait for it. Ends with the process, too."""

    def __init__(self, settings=SETTINGS, gate=GATE):
        self.settings, self.gate = settings, gate
        self.held = None

    def take(self, alone):
        gate, held = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (self.gate, self.settings))
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(held, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        except BaseException:
            os.close(held)
            raise
        finally:
            os.close(gate)
        self.held = held

    def end(self):
        if self.held is not None:
            os.close(self.held)
            self.held = None
