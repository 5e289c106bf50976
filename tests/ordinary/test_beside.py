"""Tests that need the machine alone, beside others: in a run that a test starts, and in a second run."""

import fcntl
import os
import threading
import time

import fuse_guard
import machine
import pytest
import rig as r

SERIAL = ("tests/fuse/test_limits.py", "-k", "switched_off")


def locked(path):
    """Whether another open folder holds its lock."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(folder)


@pytest.mark.parametrize("mark, selection", [
    ("serial", SERIAL),
    ("timed", ("tests/fuse/test_waits.py", "-k", "killed_daemon_is_gone")),
    ("paced", ("tests/limits/test_limits.py", "-k", "flushes_pass")),
])
def test_a_run_within_a_test_leaves_them_out(mark, selection):
    """Other tests run beside it, which they would break, or which would take their time."""
    done = r.run([r.ROOT / "scripts/pytest", "--lines", "-q", *selection], cwd="/", check=False)
    r.require(f"is marked {mark}, so it needs the machine alone" in done.stdout, f"{done.stdout}{done.stderr}")
    r.require("\nok " not in done.stdout and done.returncode == 0, f"{done.stdout}{done.stderr}")


def test_a_second_run_waits_for_this_one(rig):
    """A test of it that changes a setting does not begin before this test ends."""
    if not fuse_guard.URING_DISABLED.exists():
        raise r.Skipped("Linux 6.6 has kernel.io_uring_disabled, this kernel has not")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    second = r.Child(rig, "second", [r.ROOT / "scripts/pytest", "--lines", "-q", *SERIAL], env=env)
    # This test is under way, so what waits behind the gate is alone there until it is killed.
    # Other processes of this run have it for a moment only.
    r.wait_for("it waits", lambda: not second.running() or all(locked(machine.GATE) and not time.sleep(0.1) for _ in range(20)))
    r.require(second.running() and "switched_off" not in second.output(), f"it ran: {second.output()}")
    r.require(fuse_guard.URING_DISABLED.read_bytes()[:1] == b"0", "the setting is changed")
    second.kill()


def test_turns(rig):
    """One that wants to be alone comes after those under way, and before those that begin later."""
    folders = [rig.dir / name for name in ("settings", "gate")]
    for folder in folders:
        folder.mkdir()
    one, two, alone, later = (machine.Turn(*folders) for _ in range(4))
    order, ends = [], threading.Event()

    def run(turn, name):
        turn.take(alone=name == "alone")
        order.append(name)
        if name == "alone":
            ends.wait(r.WAIT_S)
            order.append("alone ends")
        turn.end()

    one.take(alone=False)
    two.take(alone=False)
    threads = [threading.Thread(target=run, args=(alone, "alone"))]
    threads[0].start()
    r.wait_for("it waits", lambda: locked(folders[1]))
    threads.append(threading.Thread(target=run, args=(later, "later")))
    threads[1].start()
    one.end()
    time.sleep(0.3)
    r.require(order == [], f"{order} while a test is under way")
    two.end()
    r.wait_for("it is alone", lambda: order)
    ends.set()
    for thread in threads:
        thread.join(r.WAIT_S)
    r.require(order == ["alone", "alone ends", "later"], f"the order was {order}")
