"""The floors of FUSE as programs: floor.c and floor_uring.c, compiled for this run into the bench's own folder.

Called by fuse/cases.py, once for each case. What must never happen: a bench that ends because there is no compiler, or
because the compiler's headers are too old for a floor.
"""
import os
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
COMMON = "floor_file.c"
CC_TIMEOUT_S = 60


def compiled(b, source, what):
    """-> the program's path, or None with a note. `b` is run.py's bench; `source` and `what` it is a floor of."""
    program = os.path.join(b.work, source.removesuffix(".c"))
    sources = [os.path.join(HERE, s) for s in (source, COMMON)]
    try:
        done = subprocess.run(["cc", "-O2", "-pthread", "-o", program, *sources], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=CC_TIMEOUT_S)
        problem = None if done.returncode == 0 else next((x for x in done.stderr.splitlines() if "error" in x), "cc failed")
    except (OSError, subprocess.TimeoutExpired) as e:
        problem = f"no cc: {e}" if isinstance(e, OSError) else str(e)
    if problem:
        b.report.note(f"the floor of {what} is left out, and targets against it are not measured: {problem}")
        return None
    return program
