"""qcow2-backup and qcow2-mirror: what guests keep of their IOPS while their disk is backed up or mirrored, by vshunt and by QEMU's
storage daemon.

Both are asked with the same QMP commands for one full backup after the other, each into a fresh image beside the disk's,
with default limits, from before the load begins until it has ended. A mirror is cancelled when it is ready, and the next one
begins. For backups, vshunt does the same with a fleecing file on tmpfs, and
on ext4 also with one beside the image. A server that does not survive that is a note with its
last words. What must never happen: a run that counts as one beside a backup though none was under way.
"""
import contextlib
import json
import os
import socket
import subprocess
import threading
import time

from cases import Contestant, file_system
from client import ClientError, Hung, Job
from fuse.verdicts import paired
from report import Cell, rate
from server import StartError

from qcow2 import cases, verdicts
from qcow2.images import OURS, PEER, files, ours, peer, qemu_img, written

IMAGE_BYTES = 2 << 30
JOBS = ["rr:32:1", "rw:32:1"]
# A backup finds its rate in the first seconds.
TIME_S, TIME_QUICK_S = 8, 3
KEPT_MIN = 0.7
BACKUP, MIRROR = ", backup", ", mirror"
FLEECE_MEMORY, FLEECE_DISK = BACKUP + ", fleece tmpfs", BACKUP + ", fleece same disk"
# Of a backup with a fleecing file on tmpfs, random writes.
KEPT_FLEECE_MIN = 0.5
ANSWER_S = 20
LOOK_S = 0.05


class Qmp:
    """A connection to a monitor. Raises OSError with what went wrong."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_S)
        try:
            self._connect(path)
        except BaseException:
            self.socket.close()
            raise
        self.lines = self.socket.makefile("r")
        self.errors = {}
        self._line()
        self.ask("qmp_capabilities")

    def _connect(self, path):
        end = time.monotonic() + ANSWER_S
        while True:
            try:
                return self.socket.connect(path)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(LOOK_S)

    def _line(self):
        line = self.lines.readline()
        if not line:
            raise OSError("the monitor was closed")
        return json.loads(line)

    def ask(self, command, **arguments):
        """-> what it returns. Errors of jobs that ended meanwhile are kept by the job's id."""
        text = {"execute": command, **({"arguments": arguments} if arguments else {})}
        self.socket.sendall(json.dumps(text).encode() + b"\n")
        while True:
            answer = self._line()
            if answer.get("event") == "BLOCK_JOB_COMPLETED" and "error" in answer["data"]:
                self.errors[answer["data"]["device"]] = answer["data"]["error"]
            if "error" in answer:
                raise OSError(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def close(self):
        self.lines.close()
        self.socket.close()


class Backups:
    """One after the other, from a thread, while this is entered. `done`: how many; `copied`: bytes, all together;
    `error`: why there were no more."""

    def __init__(self, img, monitor, folder, fleece=None):
        """`fleece`: the argv of vshunt's command line up to the command, and the folder of the fleecing file."""
        self.img, self.monitor, self.folder, self.fleece = img, monitor, folder, fleece
        self.done, self.copied, self.error = 0, 0, None
        self._stop, self._running = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self):
        self._thread.start()
        if not self._running.wait(ANSWER_S) or self.error:
            self.__exit__()
            raise ClientError(f"no copy began: {self.error}")
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(4 * ANSWER_S)

    def _loop(self):
        try:
            with contextlib.closing(Qmp(self.monitor)) as qmp:
                while not self._stop.is_set():
                    self._one(qmp, f"b{self.done}")
        except OSError as e:
            self.error = str(e) or type(e).__name__
            self._running.set()

    def _is_copied(self, _job):
        """Whether the job has copied all and does not end by itself."""
        return False

    def _start(self, qmp, name):
        if not self.fleece:
            qmp.ask("blockdev-backup", **{"job-id": f"job-{name}", "device": "d", "target": name, "sync": "full"})
            return
        # The command line passes the folder of the file to the sandbox.
        argv, folder = self.fleece
        start = ["backup", "start", "d", "--target", name, "--job", f"job-{name}", "--fleece", os.path.join(folder, f"{name}.fleece")]
        done = subprocess.run([*argv, *start], capture_output=True, text=True, timeout=ANSWER_S)
        if done.returncode:
            raise OSError(f"backup start: {done.stderr.strip()}")

    def _one(self, qmp, name):
        with files(os.path.join(self.folder, f"{name}.qcow2")) as (path,):
            qemu_img([*self.img, "create", "-q", "-f", "qcow2", path, str(IMAGE_BYTES)])
            qmp.ask("blockdev-add", **{"driver": "qcow2", "node-name": name, "cache": {"direct": True},
                                       "file": {"driver": "file", "filename": path, "cache": {"direct": True}}})
            self._start(qmp, name)
            self._running.set()
            copied = 0
            while job := next((j for j in qmp.ask("query-jobs") if j["id"] == f"job-{name}" and j["status"] != "concluded"), None):
                copied = max(copied, job["current-progress"])
                if self._stop.is_set() or self._is_copied(job):
                    with contextlib.suppress(OSError):  # it may just have ended
                        qmp.ask("block-job-cancel", device=f"job-{name}", force=True)
                time.sleep(LOOK_S)
            self.copied += copied
            if (error := qmp.errors.get(f"job-{name}")) and not self._stop.is_set():
                raise OSError(f"a copy failed: {error}")
            if self.fleece:
                qmp.ask("job-dismiss", id=f"job-{name}")
            qmp.ask("blockdev-del", **{"node-name": name})
            self.done += not self._stop.is_set()


class Mirrors(Backups):
    """The same for mirrors."""

    def _is_copied(self, job):
        return job["status"] == "ready"

    def _start(self, qmp, name):
        qmp.ask("blockdev-mirror", **{"job-id": f"job-{name}", "device": "d", "target": name, "sync": "full"})


def backup(b):
    """Prints the tables of backups."""
    _case(b, "qcow2-backup", BACKUP)


def mirror(b):
    """Prints the tables of mirrors."""
    _case(b, "qcow2-mirror", MIRROR)


def _case(b, case, beside):
    for kind, folder in (("tmpfs", b.shm), ("ext4", b.work)):
        found = file_system(folder) if folder else kind
        title = (f"image of {IMAGE_BYTES >> 30} GiB on {found}, every cluster written; 4k at random, with and without full "
                 f"{beside.strip(', ')}s to the same file system, default limits")
        ready = cases.usable(b, f"{case} {kind}", title, folder, 4 * IMAGE_BYTES)
        jobs = [Job.parse(t, b.o.awake) for t in JOBS if not b.o.jobs or t in b.o.jobs]
        if ready and jobs:
            _compare(*ready, f"{case} {kind}", folder, jobs, beside)


def _compare(q, img, name, folder, jobs, beside):
    b, cells = q.b, {}
    try:
        with written(img, folder, IMAGE_BYTES) as image:
            takers = [ours(b.tools, image.qcow2, OURS, "1"),
                      *([_with_monitor(peer(b.tools, image.qcow2))] if b.tools.qsd else [])]
            b.report.line(f"  here runs take {_time_s(q)} s")
            plan = [(t, what) for t in takers for what in ("", beside)]
            fleeces = {FLEECE_MEMORY: b.shm} if b.shm and beside == BACKUP else {}
            if folder != b.shm and beside == BACKUP:
                fleeces[FLEECE_DISK] = folder
            plan += [(takers[0], what) for what in fleeces]
            for rep in range(b.o.reps):
                turn = rep % len(plan)
                for job in jobs:
                    for taker, what in plan[turn:] + plan[:turn]:
                        label = taker.name + what
                        cell = cells.setdefault((str(job), label), Cell())
                        if not cell.given_up():
                            b.report.progress(f"{name}: repetition {rep + 1} of {b.o.reps}, {job}, {label}")
                            cell.add(_run(q, img, name, taker, job, what, folder, fleeces.get(what)))
    except OSError as e:
        b.report.note(f"{name}: {e}")
        return
    names = [t.name + what for t, what in plan]
    b.report.table(["job", *names], [[str(j), *(_text(cells[str(j), n]) for n in names)] for j in jobs], "  ")
    b.report.line("  medians; us: server's CPU time an I/O; MiB/s: copied beside it")
    b.report.data["cases"][name] = {"loads": [{"job": j, "contestant": n, "runs": c.runs} for (j, n), c in cells.items()]}
    for job in jobs:
        kept = paired(cells, job, PEER + beside, PEER)
        b.report.line(f"  {job}: {PEER} keeps {f'x{kept:.2f}' if kept else 'nothing that was measured: see the notes'}")
    b.report.line("  targets:")
    for job in jobs:
        verdicts.ratio(b.report, name, cells, job, [OURS + beside], [OURS], KEPT_MIN, rate)
        if FLEECE_MEMORY in fleeces and job.rw == "rw":
            verdicts.ratio(b.report, name, cells, job, [OURS + FLEECE_MEMORY], [OURS], KEPT_FLEECE_MIN, rate)


def _time_s(q):
    return max(q.client.time_s, TIME_QUICK_S if q.b.o.quick else TIME_S)


def _with_monitor(contestant):
    """The storage daemon has no monitor unless it is asked for one."""
    def argv(queues):
        return [*contestant.argv(queues), "--chardev", "socket,id=m,path={sock}.qmp,server=on,wait=off", "--monitor", "chardev=m"]
    return Contestant(contestant.name, argv)


def _text(cell):
    copied = cell.median("copied_mib_s")
    return cell.text(None, rate) + ("" if copied is None else f" {copied:,.0f} MiB/s")


def _run(q, img, name, contestant, job, beside, folder, fleece):
    """-> a result, 'hung', or 'failed: why'; with copies into `folder`, if there are any `beside`, with fleecing files in the
    folder `fleece`, if there is one."""
    b, client = q.b, q.client
    time_s, client.time_s = client.time_s, _time_s(q)
    label = f"{name} {job}: {contestant.name}{beside}"
    try:
        with b.server(contestant.name, contestant.argv(job.queues)) as server:
            monitor = server.control if contestant.name == OURS else f"{server.sock}.qmp"
            fleecing = ([b.tools.vshunt, "-c", server.control], fleece) if fleece else None
            kind = Mirrors if beside == MIRROR else Backups
            copying = kind(img, monitor, folder, fleecing) if beside else contextlib.nullcontext()
            begun = time.monotonic()
            try:
                with copying as backups:
                    result = client.load_socket(job, server, lambda pid: b.autopsy(name, contestant, job, server, pid))
                    took = time.monotonic() - begun
            except (ClientError, Hung) as e:
                if died := server.died():
                    raise ClientError(f"{died}; the load: {e or 'hung'}") from e
                raise
            if died := server.died():
                raise ClientError(died)
            if backups and backups.error:
                raise ClientError(f"copies ended after {backups.done}: {backups.error}")
        if backups:
            result |= {"backups": backups.done, "copied_mib_s": backups.copied / took / (1 << 20)}
        return result
    except Hung:
        return "hung"
    except (ClientError, StartError, OSError) as e:
        b.report.note(f"{label}: {e}")
        return f"failed: {e}"
    finally:
        client.time_s = time_s
