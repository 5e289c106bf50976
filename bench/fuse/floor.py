"""The floor of /dev/fuse as a program: floor.c, compiled for this run into the bench's own folder.

Who calls it: fuse/cases.py, once a case. What must never happen: a bench that ends because there is no compiler.
"""
import os
import subprocess

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "floor.c")
CC_TIMEOUT_S = 60


def compiled(b):
    """-> the program's path, or None with a note. `b` is run.py's bench."""
    program = os.path.join(b.work, "floor")
    try:
        done = subprocess.run(["cc", "-O2", "-pthread", "-o", program, SOURCE], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=CC_TIMEOUT_S)
        problem = None if done.returncode == 0 else next((x for x in done.stderr.splitlines() if "error" in x), "cc failed")
    except (OSError, subprocess.TimeoutExpired) as e:
        problem = f"no cc: {e}" if isinstance(e, OSError) else str(e)
    if problem:
        b.report.note(f"the floor of /dev/fuse is left out, and targets against it are not measured: {problem}")
        return None
    return program
