"""Tests that a daemon never waits for its own mount.

It ends when it is killed, and commands do not depend on the users of the mount.

Run as a program (`load PATH`), this file reads and writes PATH at random places until an error,
which it prints.
"""

import contextlib
import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import fuse_guard
import fuse_mount as m
import pytest
import rig as r
from stalls import Stalls

MIB = 1 << 20
DISK_SIZE = 16 * MIB

# Kills for each transport, in `make test` and in the long lane; `--kills` changes the first.
KILLS, KILLS_LONG = 20, 100
# Those in which it is measured how soon a killed daemon is gone, and how soon that is, besides
# stalls of the machine.
TIMED_KILLS, GONE_S = 12, 1.0
LOAD_THREADS = 4
LOAD_BYTES = 4096

# Functions of the kernel in which a task waits for a FUSE server.
WAITS = ("request_wait_answer", "fuse_get_req", "fuse_simple_request", "fuse_flush", "exit_aio", "fuse_wait_aborted")


def load(path):
    """Threads that read and write with O_DIRECT, until an error or SIGTERM."""
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    print("open", flush=True)

    def loop(seed):
        chance = random.Random(seed)
        with mmap.mmap(-1, LOAD_BYTES) as buffer:
            while not over.is_set():
                offset = chance.randrange(DISK_SIZE // LOAD_BYTES) * LOAD_BYTES
                try:
                    os.preadv(fd, [buffer], offset)
                    os.pwritev(fd, [buffer], offset)
                except OSError as e:
                    os.write(1, f"error {e.strerror}\n".encode())
                    os._exit(3)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(LOAD_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def loaded(suite, name, path):
    child = r.Child(suite.rig, name, [sys.executable, "-B", __file__, "load", path])
    r.wait_for(f"{name} has the file open", lambda: "open" in child.output() or not child.running())
    return child


def connections(path):
    return [x[0] for x in m.fuse_mounts() if x[1] == str(path)]


class Busy:
    """Commands of one kind to a daemon, one after another, until it is gone. Refusals are no errors here."""

    def __init__(self, mount, action, chance, folder):
        self.mount = mount
        self.chance = chance
        self.folder = folder
        self.made = 0
        self.over = False
        self.workers = []
        self.thread = threading.Thread(target=self.loop, args=(getattr(self, action),), daemon=True)
        self.thread.start()

    def cli(self, *arguments):
        return self.mount.cli(*arguments, check=False)

    def loop(self, turn):
        while not self.over and self.mount.child.running():
            with contextlib.suppress(r.Failed):
                turn()

    def attach(self):
        if len(self.workers) < 3:
            self.workers.append(self.cli("worker", "new").stdout.strip())
        to = self.chance.choice(self.workers)
        for queue in range(2):
            self.cli("attach", f"f0:{queue}", to)
        if self.chance.random() < 0.5:
            free = self.chance.choice(self.workers)
            if self.cli("worker", "free", free).returncode == 0:
                self.workers.remove(free)

    def snapshot(self):
        self.made += 1
        self.cli("snapshot", "d0", "--to", self.folder / f"{self.mount.name}-{self.made}.qcow2")

    def remove(self):
        self.cli("export", "remove", "f0", "--force")
        self.cli("export", "add", self.mount.arguments[3])

    def end(self):
        self.over = True
        self.thread.join(r.WAIT_S)


def gone(mount, number):
    """Signals the daemon. Returns when, and when it had no thread left."""
    start = time.monotonic()
    mount.child.process.send_signal(number)
    try:
        mount.child.wait()
    except r.Failed:
        m.abort(connections(mount.path))  # or it stays for good
        raise r.Failed(f"{signal.Signals(number).name}: the daemon is not gone after {r.WAIT_S:g} s") from None
    return start, time.monotonic()


def ended(path):
    """Whether a killed daemon's mount is gone or refuses requests: the kernel ends an io_uring after its process."""
    seen = r.run(["stat", path], check=False, env={**os.environ, "LC_ALL": "C"})
    return not m.mounted(path) or "not connected" in seen.stderr or "connection abort" in seen.stderr


def killed(suite, prefix, kills, stalls=None):
    """SIGKILL and SIGABRT at random moments of moves, snapshots and removals under load. With `stalls`, the daemon has to be
    gone within GONE_S. `prefix`: of all names."""
    suite.ours()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    chance = random.Random(int(os.environ.get("VSHUNT_SEED", "17")))
    path = suite.rig.dir / f"{prefix}-{suite.transport}.mnt"
    folder = suite.memory
    longest = 0.0
    for turn in range(kills):
        name = f"{prefix}-{suite.transport}-{turn}"
        image = suite.image(f"{name}.img", DISK_SIZE, memory=True)
        mount = m.Mount(suite, name, image=image, path=path)
        users = loaded(suite, f"{name}-users", path)
        action = ("attach", "snapshot", "remove")[turn % 3]
        busy = Busy(mount, action, chance, folder)
        time.sleep(chance.uniform(0.0, 0.2))
        number = signal.SIGABRT if turn % 2 else signal.SIGKILL
        try:
            start, end = gone(mount, number)
        finally:
            busy.end()
        took = end - start - (stalls.within(start, end) if stalls else 0.0)
        longest = max(longest, took)
        if stalls and took > GONE_S:
            raise r.Late(f"{signal.Signals(number).name}: the daemon was gone after {took:.1f} s")
        code = users.wait()
        r.require(code == 3, f"turn {turn} ({action}): the users ended with {code}: {users.tail(3)}")
        r.wait_for("the killed daemon's connection ends", lambda: ended(path))
        for left in folder.glob(f"{name}*"):
            left.unlink()
    # A daemon that is killed between making the file below its mount and mounting, or between
    # unmounting and removing the file, leaves it, empty. The next one cannot know whose it is.
    if not m.mounted(path) and path.exists():
        r.require(path.stat().st_size == 0, f"{path} has data")
        path.unlink()
    image = suite.image(f"{prefix}-{suite.transport}.img", DISK_SIZE)
    mount = m.Mount(suite, f"{prefix}-{suite.transport}", image=image, path=path)
    with m.Opened(path) as fd:
        r.require(os.pwrite(fd, b"again", 1000) == 5 and os.pread(fd, 5, 1000) == b"again", "the next daemon's mount does not work")
    mount.stop()
    suite.rig.say(f"{suite.transport}: {kills} kills, the longest took {longest * 1000:.0f} ms")


def mount_id(path):
    """Of the FUSE mount at `path`, as in mountinfo."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[4] == str(path) and " - fuse" in line:
            return fields[0]
    raise r.Failed(f"{path} is not mounted")


def family(pid):
    """A process and its children: (process, thread) pairs. What ends meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task, children in r.threads(pid, "children"):
            yield pid, task
            for child in children.split():
                yield from family(int(child))


def waiting(pid):
    """Threads of the process, and of its children, that wait for a FUSE server: their names and stacks."""
    found = []
    for process, task in family(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stack = (task / "stack").read_text()
            if any(name in stack for name in WAITS):
                found.append(f"{process} {(task / 'comm').read_text().strip()}: {stack.splitlines()[:4]}")
    return found


def open_on(pid, number):
    """Descriptors of a process that are of the mount with that number."""
    found = []
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if f"mnt_id:\t{number}\n" in info.read_text():
                found.append(info.name)
    return found


class Stopped:
    """A mount whose requests for attributes and data get no answer: its image is the file of another daemon, which is
    stopped. A thread that waits for the mount is held for good."""

    def __init__(self, suite, name):
        image = suite.image(f"{name}-below.img", DISK_SIZE)
        below = suite.rig.dir / f"{name}-below.mnt"
        export = f"type=fuse,name=g0,disk=b,mountpoint={below},transport=dev,passthrough=off,writable=on"
        self.below = r.Daemon(suite.rig, "--disk", f"name=b,file={image}", "--export", export, name=f"{name}-below")
        more = ["--disk", "name=r,format=ram,size=1M"]
        self.mount = m.Mount(suite, name, disk=f"file={below}", more=more)
        r.run(["stat", self.mount.path])

    def __enter__(self):
        self.below.child.suspend()
        return self.mount

    def __exit__(self, *_):
        self.below.child.resume()

    def end(self):
        self.mount.stop()
        r.require(self.below.child.stop() == 0, self.below.child.tail())


def test_commands_while_the_mount_answers_nobody(suite):
    """Commands to a daemon whose mount does not answer do not wait for the mount.

    Nor does a child process.
    """
    suite.ours()
    name = f"never-{suite.transport}"
    stopped = Stopped(suite, name)
    number = mount_id(stopped.mount.path)
    with stopped as mount:
        pid = mount.child.pid
        worker = mount.daemon.worker_new()
        for queue in mount.queues():
            mount.cli("attach", f"f0:{queue['index']}", str(worker))
        r.require(not waiting(pid), f"after moves: {waiting(pid)}")
        path = mount.path
        for command in (
            ("disk", "add", f"name=d1,file={path}"),
            ("disk", "add", f"name=d1,format=qcow2,file={path}"),
            ("snapshot", "d0", "--existing", "--to", path),
            ("backup", "start", "d0", "--to", path, "--overwrite"),
            ("export", "add", f"type=fuse,name=f1,disk=r,mountpoint={path}"),
        ):
            said = mount.cli(*command, check=False)
            r.message_of(said, path)
            r.require(not waiting(pid), f"{' '.join(map(str, command))}: {waiting(pid)}")
        mount.cli("status")
        r.require(not open_on(pid, number), f"descriptors {open_on(pid, number)} are of its own mount")
    stopped.end()


def test_flush_is_sent_once(suite):
    """The first FLUSH is answered with ENOSYS, and the kernel sends no other.

    A process that closes a file then waits for no daemon.
    """
    suite.ours()
    name = f"flushed-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", DISK_SIZE))
    with m.Opened(mount.path):
        pass
    steps, step = os.pipe()
    pid = os.fork()
    if pid == 0:
        fd = os.open(mount.path, os.O_RDWR)
        os.pread(fd, 512, 0)
        os.write(step, b"o")
        signal.pause()
        os._exit(1)
    os.read(steps, 1)
    mount.child.suspend()
    try:
        # Its end closes the file.
        os.kill(pid, signal.SIGKILL)
        r.wait_for("a process that has the file open ends", lambda: os.waitpid(pid, os.WNOHANG) != (0, 0))
    finally:
        mount.child.resume()
        os.close(steps)
        os.close(step)
    mount.stop()


def test_under_load_no_thread_is_seen_to_wait(suite):
    """Under load, moves, snapshots and bitmaps: no thread is ever seen to wait for a mount, no descriptor is of it."""
    suite.ours()
    name = f"watched-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", DISK_SIZE, memory=True))
    number, pid = mount_id(mount.path), mount.child.pid
    users = loaded(suite, f"{name}-users", mount.path)
    seen, looks, over = [], 0, threading.Event()

    def look():
        nonlocal looks
        while not over.is_set():
            seen.extend(waiting(pid))
            seen.extend(f"descriptor {fd}" for fd in open_on(pid, number))
            looks += 1

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    for turn in range(4):
        worker = mount.daemon.worker_new()
        for queue in mount.queues():
            mount.cli("attach", f"f0:{queue['index']}", str(worker))
        mount.cli("bitmap", "add", "d0", f"b{turn}")
        mount.cli("snapshot", "d0", "--to", suite.memory / f"{name}-{turn}.qcow2")
        mount.cli("bitmap", "remove", "d0", f"b{turn}", check=False)
    mount.cli("export", "remove", "f0", "--force")
    over.set()
    watcher.join(r.WAIT_S)
    r.require(users.wait() == 3, f"the users: {users.tail(3)}")
    r.require(not seen, f"in {looks} looks: {seen[:3]}")
    mount.cli("export", "add", mount.arguments[3])
    mount.stop()


def test_as_many_asynchronous_requests_as_there_may_be(suite):
    """A connection that has as many asynchronous requests as it may have: queues move, snapshots are taken."""
    suite.ours()
    name = f"crowded-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", DISK_SIZE, memory=True))
    for number in connections(mount.path):
        (fuse_guard.CONNECTIONS / str(number) / "max_background").write_text("2")
        (fuse_guard.CONNECTIONS / str(number) / "congestion_threshold").write_text("1")
    argv = [
        r.tool("fio", "fio"), "--name=crowd", f"--filename={mount.path}", "--ioengine=libaio", "--direct=1", "--iodepth=64", "--rw=randrw",
        "--bs=4k", f"--size={DISK_SIZE}", "--numjobs=2", "--thread", "--time_based", "--runtime=60", "--eta=never", "--allow_file_create=0",
    ]  # fmt: skip
    before = sum(q["requests"] for q in mount.queues())
    users = r.Child(suite.rig, f"{name}-users", argv)
    r.wait_for("fio's requests", lambda: sum(q["requests"] for q in mount.queues()) > before + 1000 or not users.running())
    worker = mount.daemon.worker_new()
    for turn in range(3):
        for queue in mount.queues():
            mount.cli("attach", f"f0:{queue['index']}", str(worker if turn % 2 == 0 else 0))
        mount.cli("snapshot", "d0", "--to", suite.memory / f"{name}-{turn}.qcow2")
    r.require(users.running(), f"fio ended: {users.tail()}")
    users.process.send_signal(signal.SIGINT)
    users.wait()
    errors = [q for q in mount.queues() if q["errors"]]
    r.require(not errors, f"requests failed: {errors}")
    mount.stop()


def test_something_is_mounted_over_the_path(suite):
    """Something else is mounted over the path: queues move and snapshots are taken all the same."""
    suite.ours()
    name = f"covered-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", DISK_SIZE, memory=True))
    cover = suite.rig.dir / f"{name}.cover"
    cover.write_text("cover")
    users = loaded(suite, f"{name}-users", mount.path)
    r.run(["mount", "--bind", cover, mount.path])
    try:
        worker = mount.daemon.worker_new()
        for queue in mount.queues():
            mount.cli("attach", f"f0:{queue['index']}", str(worker))
        mount.cli("snapshot", "d0", "--to", suite.memory / f"{name}.qcow2")
        r.require(users.running(), f"the users: {users.tail(3)}")
    finally:
        r.run(["umount", mount.path])
    users.kill()
    mount.stop()


def test_a_request_that_is_set_aside_is_counted_once(suite):
    """A request that is set aside while its queue moves or pauses is counted once, by its queue and by a worker."""
    suite.ours()
    name = f"counted-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", DISK_SIZE, memory=True))
    users = loaded(suite, f"{name}-users", mount.path)
    workers = [0, mount.daemon.worker_new()]
    for turn in range(6):
        for queue in mount.queues():
            mount.cli("attach", f"f0:{queue['index']}", str(workers[turn % 2]))
        mount.cli("snapshot", "d0", "--to", suite.memory / f"{name}-{turn}.qcow2")
    # Not killed: the kernel would send an INTERRUPT for each request, which only the worker counts.
    r.require(users.stop() == 0, f"the users: {users.tail(3)}")
    seen = []

    def counts():
        status = mount.daemon.status()
        seen[:] = [sum(x["requests"] for x in status[what]) for what in ("queues", "workers")]
        return seen[0] == seen[1] and all(q["in-flight"] == 0 for q in status["queues"])

    try:
        r.wait_for("the counts agree", counts)
    except r.Failed:
        raise r.Failed(f"the queues counted {seen[0]} requests, their workers {seen[1]}") from None
    mount.stop()


@pytest.mark.transports("io_uring")
def test_entries_of_a_moved_queue_are_forwarded_also_by_a_freed_worker(suite):
    """Idle entries stay with the worker that a ring queue leaves, also when that is freed, until requests took them."""
    suite.ours()
    name = f"forwarded-{suite.transport}"
    mount = m.Mount(suite, name, image=suite.image(f"{name}.img", DISK_SIZE, memory=True))
    rings = mount.queues()[:-1]

    def left():
        return mount.export()["mount"]["forwarded-entries"]

    r.require(left() == 0, f"{left()} entries are forwarded before any move")
    first = mount.daemon.worker_new()
    for queue in rings:
        mount.cli("attach", f"f0:{queue['index']}", str(first))
    was = left()
    r.require(was > 0, "no entry was idle")
    second = mount.daemon.worker_new()
    for queue in rings:
        mount.cli("attach", f"f0:{queue['index']}", str(second))
    before = len(r.thread_ids(mount.child.pid))
    mount.cli("worker", "free", str(first))
    r.require(first not in [w["id"] for w in mount.daemon.status()["workers"]], "the freed worker is listed")
    with m.Opened(mount.path) as fd:
        r.require(os.pwrite(fd, b"moved", 1000) == 5 and os.pread(fd, 5, 1000) == b"moved", "a forwarded request came to nothing")
    cpus = sorted(os.sched_getaffinity(0))
    try:
        for cpu in cpus:  # as many requests at a time as there are entries, from each CPU
            os.sched_setaffinity(0, {cpu})
            argv = [
                r.tool("fio", "fio"), "--name=deep", f"--filename={mount.path}", "--ioengine=libaio", "--direct=1", "--iodepth=256",
                "--iodepth_batch=256", "--iodepth_batch_complete_min=128", "--rw=randread", "--bs=4k", f"--size={DISK_SIZE}", "--loops=4",
                "--eta=never", "--allow_file_create=0",
            ]  # fmt: skip
            r.run(argv)
    finally:
        os.sched_setaffinity(0, cpus)
    now = left()
    r.require(now < was, f"{now} of {was} entries are still forwarded after as many requests at a time")
    if now == 0:
        r.wait_for("the freed worker's thread ends", lambda: len(r.thread_ids(mount.child.pid)) < before)
    mount.stop()


@pytest.mark.transports("io_uring")
def test_a_daemon_that_may_not_use_each_cpu(suite):
    """A daemon that may not run on each CPU: `auto` chooses dev and says why; io_uring works when it is asked for."""
    suite.ours()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise r.Skipped("there is one CPU")
    path = suite.rig.dir / "confined.mnt"
    image = suite.image("confined.img", DISK_SIZE, memory=True)
    export = f"type=fuse,name=f0,disk=d0,mountpoint={path},writable=on,passthrough=off,transport="
    os.sched_setaffinity(0, cpus[:1])
    try:
        daemon = r.Daemon(suite.rig, "-v", "--disk", f"name=d0,file={image}", "--export", f"{export}auto", name="confined")
    finally:
        os.sched_setaffinity(0, cpus)
    mount = daemon.status()["exports"][0]["mount"]
    r.require(mount["transport"] == "dev" and f"CPU {cpus[1]}" in mount["transport-reason"], f"auto chose {mount}")
    r.require("auto chose dev" in daemon.child.output(), f"the log does not say why: {daemon.child.tail()}")
    r.require(mount["transport-reason"] in daemon.cli("status").stdout, "status does not say why")
    daemon.cli("export", "remove", "f0")
    daemon.cli("export", "add", f"{export}io_uring")
    users = loaded(suite, "confined-users", path)
    worker = daemon.worker_new()
    for queue in daemon.status()["queues"]:
        daemon.cli("attach", f"f0:{queue['index']}", str(worker))
    daemon.cli("snapshot", "d0", "--to", suite.memory / "confined.qcow2")
    r.require(users.running(), f"the users: {users.tail(3)}")
    users.kill()
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_killed_in_moves_snapshots_and_removals(suite, guarded, request):
    kills = request.config.getoption("--kills") or KILLS
    guarded(10 * kills)
    killed(suite, "killed", kills)


@pytest.mark.long
def test_killed_a_hundred_times(suite, guarded):
    guarded(10 * KILLS_LONG)
    killed(suite, "hundred", KILLS_LONG)


@pytest.mark.timed
def test_a_killed_daemon_is_gone_at_once(suite, guarded):
    guarded(10 * TIMED_KILLS)
    killed(suite, "at-once", TIMED_KILLS, Stalls())


if __name__ == "__main__" and sys.argv[1:2] == ["load"]:
    load(sys.argv[2])
