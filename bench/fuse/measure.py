"""The loop of the FUSE cases: jobs x contestants x repetitions, and one run.

Contestants take turns within a repetition, and the turn begins with another one in each; each run has a server and a
mount of its own. A contestant that cannot be started is given up after two attempts, whatever the job.
"""
import contextlib

from cases import awake
from client import ClientError, Hung
from report import Cell
from server import StartError

from fuse.contestants import OVER_URING
from fuse.load import load
from fuse.mount import MountServer, Place, uring_enabled

STARTS_FAILED_MAX = 2


def measure(b, client, case, plan, disk, reps):
    """`plan`: [(job, contestants)]; b is run.py's bench. -> {(job, name): Cell}"""
    cells, unstarted = {}, {}
    for rep in range(reps):
        for job, takers in plan:
            turn = rep % len(takers) if takers else 0
            for contestant in takers[turn:] + takers[:turn]:
                cell = cells.setdefault((str(job), contestant.name), Cell())
                if cell.given_up() or unstarted.get(contestant.name, 0) >= STARTS_FAILED_MAX:
                    continue
                b.report.progress(f"{case}: repetition {rep + 1} of {reps}, {job}, {contestant.name}")
                try:
                    cell.add(_run(b, client, case, contestant, job, disk))
                    unstarted[contestant.name] = 0
                except StartError as e:
                    unstarted[contestant.name] = unstarted.get(contestant.name, 0) + 1
                    b.report.note(f"{case}: {e}")
                    cell.add(f"failed: {e}")
    return cells


def _run(b, client, case, contestant, job, disk):
    """-> a result, 'hung', or 'failed: why'. Raises StartError."""
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(awake(job.awake))
            if contestant.argv is None:
                return load(client, job, disk.path, disk.size)
            stack.enter_context(uring_enabled(contestant.name in OVER_URING))
            place = Place(b.tools.root, b.work)
            server = stack.enter_context(MountServer(contestant.name, contestant.argv(disk, place), place))

            def on_hang(pid):
                b.autopsy(case, contestant, job, server, pid)
                server.abort()

            result = load(client, job, place.inside, disk.size, server, on_hang)
            if died := server.died():
                raise ClientError(died)
        if server.killed:
            b.report.note(f"{case} {job}: {contestant.name} did not end on SIGTERM; its connection was aborted")
        return result
    except Hung:
        return "hung"
    except (ClientError, OSError) as e:
        b.report.note(f"{case} {job}: {contestant.name}: {e}")
        return f"failed: {e}"
