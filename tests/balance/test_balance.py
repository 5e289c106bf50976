"""Queues that follow load: moved, reported, or left where they are.

What is asserted is where queues are in the end, and that no request is lost; never how fast it was. Whether a move pays depends on
the CPU time that load and workers get, so most tests have the mark `timed`.
"""

import contextlib
import json
import re
import socket
import time

import pytest
import rig as r
from rates import needs_cpu

# Copies of this size keep a worker busy.
LOAD = ["--rw", "randrw", "--bs", "64k", "--iodepth", "16", "--queues", "4"]


def served(rig, name, *arguments, exports=2, keys=""):
    """A daemon with two workers and exports vm0, vm1 … of four queues, all of them on worker 0."""
    made = ["--worker", "name=second"]
    for at in range(exports):
        made += ["--disk", f"name=d{at},format=ram,size=64M"]
        made += ["--export", f"type=vhost-user-blk,name=vm{at},disk=d{at},socket={rig.dir}/{name}{at}.sock,queues=4{keys}"]
    return r.Daemon(rig, *made, *arguments, name=name)


@contextlib.contextmanager
def load(daemon, at, *more):
    """A load that checks what it reads. At its end all data is read back."""
    path = daemon.rig.dir / f"{daemon.name}{at}.sock"
    argv = [r.binary("vshunt-bench"), "blk", "--socket", path, "--quiet", *LOAD, "--runtime", r.FOREVER, *more]
    child = r.Child(daemon.rig, f"{daemon.name}-load{at}", argv)
    before = requests(daemon, at)
    r.wait_for(f"vm{at} has requests", lambda: requests(daemon, at) > before)
    yield child
    r.require(child.running(), child.tail())
    r.require(child.interrupt() == 0, child.tail())


def queues(daemon, at):
    return [q for q in daemon.status()["queues"] if q["export"] == f"vm{at}" and q["state"] == "running"]


def requests(daemon, at):
    return sum(q["requests"] for q in daemon.status()["queues"] if q["export"] == f"vm{at}")


def workers(daemon, at):
    """The workers of the queues of an export that are in use, by queue."""
    return [q["worker"] for q in queues(daemon, at)]


def balancing(daemon, at=0):
    exports = {e["name"]: e for e in daemon.status()["exports"]}
    return exports[f"vm{at}"].get("balancing")


def spread(daemon, at):
    """Wait until an export uses both workers."""
    r.wait_for(f"vm{at} is on both workers", lambda: set(workers(daemon, at)) == {0, 1}, every_s=0.2)


class Events:
    """The events of a daemon, from now on."""

    def __init__(self, daemon):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(daemon.control))
        self.lines = self.socket.makefile("rw")
        self.lines.readline()
        self.lines.write('{"execute": "qmp_capabilities"}\n')
        self.lines.flush()

    def wait(self, name):
        self.socket.settimeout(r.WAIT_S)
        while True:
            try:
                event = json.loads(self.lines.readline())
            except TimeoutError as e:
                raise r.Late(f"no event {name} within {r.WAIT_S:g} s") from e
            if event.get("event") == name:
                return event["data"]


@pytest.mark.timed
def test_queues_follow_a_load_that_shifts(rig):
    daemon = served(rig, "shift", "--balance", "auto")
    events = Events(daemon)
    r.require(workers(daemon, 0) == [], "no queue runs yet")
    with load(daemon, 0, "--verify"):
        spread(daemon, 0)
        r.message_of(daemon.cli("worker", "free", "second", check=False), "to another worker first", "balance off --export vm0", code=(1,))
        told = events.wait("QUEUE_BALANCED")
        r.require((told["from"], told["worker"]) == (0, 1), f"event: {told}")
        needs_cpu(told["outcome"] == "moved", f"event: {told}")
        r.require("worker 0" in told["reason"], f"event: {told}")
        # The load is divided now, so that each worker has some of it.
        done = {w["id"]: w["requests"] for w in daemon.status()["workers"]}
        r.wait_for("both have requests", lambda: all(w["requests"] > done[w["id"]] for w in daemon.status()["workers"]))
    with load(daemon, 1, "--verify"):
        spread(daemon, 1)
        with load(daemon, 0, "--verify"):
            spread(daemon, 0)
    info = balancing(daemon)
    moved = sum(q["generation"] for q in daemon.status()["queues"])
    r.require(info["mode"] == "auto" and info["moves"] > 0 and info["last"]["reason"], f"balancing: {info}")
    r.require(moved > 0, "no queue has moved")
    table = daemon.cli("status").stdout
    r.require("BALANCE" in table and "from worker" in table, f"status: {table}")
    shown = daemon.cli("config", "show").stdout
    r.require('balance = "auto"' in shown and "[[attach]]" not in shown, f"config: {shown}")


@pytest.mark.timed
def test_a_dry_run_moves_nothing(rig):
    daemon = served(rig, "dry", exports=1, keys=",balance=dry-run")
    events = Events(daemon)
    with load(daemon, 0):
        for _ in range(2):
            told = events.wait("QUEUE_BALANCED")
            r.require(told["outcome"] == "dry-run" and told["from"] == 0 and told["worker"] == 1, f"event: {told}")
        r.require(set(workers(daemon, 0)) == {0}, "a dry run has moved a queue")
        info = balancing(daemon)
        r.require(info["moves"] == 0 and info["decisions"] > 0, f"balancing: {info}")
        r.require("not done" in daemon.cli("status").stdout, daemon.cli("status").stdout)
        daemon.cli("balance", "auto", "--export", "vm0")
        spread(daemon, 0)
        daemon.cli("balance", "off", "--export", "vm0")
        daemon.cli("attach", "vm0:0-3", "0")
        time.sleep(1.5)
        r.require(set(workers(daemon, 0)) == {0}, "a queue has moved with balance off")


@pytest.mark.timed
def test_queues_that_a_command_attached_stay(rig):
    daemon = served(rig, "stay")
    daemon.cli("attach", "vm0:0-3", "0")
    daemon.cli("balance", "auto")
    r.require(balancing(daemon).get("attached") is None, "what was attached before balance was set may move")
    daemon.cli("attach", "vm0:0-3", "0")
    r.require(balancing(daemon)["attached"] == [0, 1, 2, 3], f"balancing: {balancing(daemon)}")
    with load(daemon, 0):
        with load(daemon, 1):
            r.wait_for("vm1 leaves", lambda: 1 in workers(daemon, 1), every_s=0.2)
            r.require(set(workers(daemon, 0)) == {0}, "a queue has left that a command attached")
        # A queue that cannot be attached is not kept.
        r.message_of(daemon.cli("attach", "vm0:0", "77", check=False), "77")
        daemon.cli("balance", "auto")
        r.require(balancing(daemon).get("attached") is None, f"balancing: {balancing(daemon)}")
        spread(daemon, 0)
    shown = daemon.cli("balance").stdout
    r.require("balance is auto" in shown and "vm0" in shown, shown)
    r.require(json.loads(daemon.cli("balance", "--json").stdout)["exports"]["vm0"]["mode"] == "auto", shown)


@pytest.mark.timed
def test_workers_of_other_exports_are_not_used(rig):
    keys = f"type=vhost-user-blk,name=own,disk=other,socket={rig.dir}/own.sock,queues=4,workers=2"
    more = ("--disk", "name=other,format=ram,size=64M", "--export", keys)
    daemon = served(rig, "pools", "--balance", "auto", *more, exports=1)
    daemon.cli("worker", "free", "second")
    with load(daemon, 0):
        time.sleep(3)
        r.require(set(workers(daemon, 0)) == {0}, f"vm0 is on {workers(daemon, 0)}, and has worker 0 only")
        daemon.worker_new()
        r.wait_for("vm0 uses the new worker", lambda: len(set(workers(daemon, 0))) == 2, every_s=0.2)


def threads(daemon, name):
    """How often each of the daemon's threads of a name has slept."""
    named = [status for _, comm, status in r.threads(daemon.child.pid, "comm", "status") if comm.strip() == name]
    return [int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)$", text, re.MULTILINE)[1]) for text in named]


def test_without_balance_there_is_no_thread_and_without_load_no_work(rig):
    daemon = served(rig, "idle", exports=1)
    r.require(threads(daemon, "balance") == [], "a thread without balance")
    r.require(balancing(daemon) is None, "balance is off")
    daemon.cli("balance", "auto")
    r.wait_for("its thread", lambda: threads(daemon, "balance"))
    # It looks once a second. A look that meets a lock sleeps once more.
    since, before = time.monotonic(), threads(daemon, "balance")[0]
    time.sleep(5)
    slept = threads(daemon, "balance")[0] - before
    most = 2 * (time.monotonic() - since + 1)
    r.require(slept <= most, f"without load the thread was woken {slept} times, more than {most:.0f}")
    daemon.cli("balance", "off")
    r.wait_for("the thread ends", lambda: threads(daemon, "balance") == [])


def test_wrong_settings_are_refused(rig):
    daemon = served(rig, "wrong", exports=1)
    for arguments in (["on"], ["auto", "--export", "vm7"], ["default"], ["auto", "--json"]):
        r.message_of(daemon.cli("balance", *arguments, check=False))
    for keys in ("balance=on", "balance=auto,engine=kernel"):
        export = f"type=vhost-user-blk,name=x,disk=d0,socket={rig.dir}/x.sock,{keys}"
        r.message_of(daemon.cli("export", "add", export, check=False))
    r.message_of(daemon.cli("export", "add", f"type=fuse,name=f,disk=d0,mountpoint={rig.dir}/f,balance=auto", check=False), "balance")
    for arguments in ("{}", '{"mode": "on"}', '{"mode": "auto", "export": "vm7"}', '{"mode": 5}'):
        r.require(daemon.cli("qmp", "balance-set", arguments, check=False).returncode == 1, f"{arguments} is accepted")


def served_some(daemon):
    """Wait until a daemon has served 100 requests."""
    r.wait_for("it has requests", lambda: requests(daemon, 0) > 100)


def test_a_daemon_that_is_killed_while_it_balances_loses_no_request(rig):
    image = rig.image("killed.img", 64 << 20)
    keys = f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/killed0.sock,queues=4"
    daemon = r.Daemon(
        rig, "--worker", "name=second", "--disk", f"name=d0,file={image}", "--export", keys, "--balance", "auto", name="killed"
    )
    with load(daemon, 0, "--verify", "--reconnect", "60s"):
        for _ in range(3):
            served_some(daemon)
            # It looks ten times a second.
            time.sleep(0.5)
            daemon.child.kill()
            daemon.start()
        served_some(daemon)


def sized(rig, name, *arguments, keys=""):
    """A daemon with an export of four queues and `workers=auto`."""
    disk = ("--disk", "name=d0,format=ram,size=64M")
    export = f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/{name}0.sock,queues=4,workers=auto{keys}"
    return r.Daemon(rig, *disk, "--export", export, *arguments, name=name)


def pool(daemon):
    """The workers of vm0, by name."""
    return {w["name"]: w["id"] for w in daemon.status()["workers"] if w["name"].startswith("vm0/")}


@pytest.mark.timed
def test_workers_are_made_and_freed_as_load_needs_them(rig):
    daemon = sized(rig, "auto")
    events = Events(daemon)
    r.require(list(pool(daemon)) == ["vm0/0"], f"one worker at first: {pool(daemon)}")
    r.require(balancing(daemon)["mode"] == "auto", "workers=auto has queues follow load")
    with load(daemon, 0):
        made = events.wait("WORKERS_BALANCED")
        r.require(made["workers"] == 2, f"event: {made}")
        needs_cpu(made["outcome"] == "done", f"event: {made}")
        r.require("no time left" in made["reason"] and made["worker"] in pool(daemon).values(), f"event: {made}")
        # Balance is off, so the result stays as it is.
        daemon.cli("balance", "off", "--export", "vm0")
        resized = balancing(daemon)["resized"]
        shown = daemon.cli("balance").stdout
        r.require(f"{resized['workers']} worker" in shown, shown)
        top = daemon.cli("top", "--once", "--interval", "200ms").stdout
        r.require("BALANCE" in top and resized["reason"] in top, top)
        view = json.loads(daemon.cli("top", "--once", "--json", "--interval", "200ms").stdout)
        r.require(view["exports"][0]["balancing"]["resized"]["workers"] == resized["workers"], f"top: {view['exports']}")
        daemon.cli("balance", "default", "--export", "vm0")
    r.wait_for("the workers are freed", lambda: list(pool(daemon)) == ["vm0/0"], every_s=0.2)
    r.require(balancing(daemon)["resized"]["workers"] == 1, f"balancing: {balancing(daemon)}")
    daemon.cli("balance", "off", "--export", "vm0")
    shown = daemon.cli("config", "show").stdout
    r.require('workers = "auto"' in shown and 'balance = "off"' in shown, shown)
    config = rig.dir / "shown.toml"
    config.write_text(shown)
    r.run([r.binary("vshunt"), "config", "check", config])
    daemon.cli("balance", "default", "--export", "vm0")
    r.require(balancing(daemon)["mode"] == "auto", f"workers=auto without a mode of its own: {balancing(daemon)}")
    daemon.cli("export", "remove", "vm0")
    r.require(pool(daemon) == {}, f"left: {pool(daemon)}")


@pytest.mark.timed
def test_a_removed_export_leaves_no_worker(rig):
    """Exports with load are removed while workers are made."""
    daemon = sized(rig, "gone")
    for _ in range(3):
        with contextlib.suppress(r.Failed), load(daemon, 0):
            r.wait_for("a second worker", lambda: len(pool(daemon)) > 1, every_s=0.05)
            daemon.cli("export", "remove", "vm0", "--force", check=False)
        r.wait_for("no export", lambda: not daemon.status()["exports"])
        r.require(pool(daemon) == {}, f"left: {pool(daemon)}")
        daemon.cli("export", "add", f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/gone0.sock,queues=4,workers=auto")


@pytest.mark.timed
def test_a_dry_run_makes_no_worker(rig):
    daemon = sized(rig, "told", keys=",balance=dry-run")
    events = Events(daemon)
    with load(daemon, 0):
        told = events.wait("WORKERS_BALANCED")
        r.require((told["workers"], told["worker"], told["outcome"]) == (2, None, "dry-run"), f"event: {told}")
        r.require(list(pool(daemon)) == ["vm0/0"], f"a dry run has made a worker: {pool(daemon)}")
        r.require("not done" in daemon.cli("status").stdout, daemon.cli("status").stdout)


def test_workers_auto_is_refused_where_nothing_follows_load(rig):
    daemon = served(rig, "refused", exports=1)
    socket_of = f"socket={rig.dir}/y.sock"
    for export, word in (
        (f"type=vhost-user-blk,name=y,disk=d0,{socket_of},workers=auto,engine=kernel", "engine=kernel"),
        (f"type=fuse,name=y,disk=d0,mountpoint={rig.dir}/y,workers=auto", "per-queue"),
        (f"type=vhost-user-blk,name=y,disk=d0,{socket_of},workers=automatic", "auto or a number"),
    ):
        r.message_of(daemon.cli("export", "add", export, check=False), word)


@pytest.mark.timed
def test_new_workers_are_like_the_first_one_and_end_without_it(rig):
    daemon = sized(rig, "like")
    daemon.cli("worker", "set", "vm0/0", "--nice", "3", "--poll-us", "7")
    with load(daemon, 0):

        def second_stays():
            """The second worker, with balance off. None if it was freed before."""
            r.wait_for("a second worker", lambda: len(pool(daemon)) > 1, every_s=0.05)
            daemon.cli("balance", "off", "--export", "vm0")
            made = [w for w in daemon.status()["workers"] if w["name"].startswith("vm0/") and w["name"] != "vm0/0"]
            if not made:
                daemon.cli("balance", "auto", "--export", "vm0")
            return made and made[0]

        made = r.wait_for("a second worker that stays", second_stays)
        second = made["name"]
        r.require((made["nice"], made["poll-us"]) == (3, 7), f"new: {made}")
        daemon.cli("attach", "vm0", second)
        daemon.cli("worker", "free", "vm0/0")
        daemon.cli("balance", "auto", "--export", "vm0")
        r.wait_for("two again", lambda: len(pool(daemon)) == 2, every_s=0.2)
    r.wait_for("one is left", lambda: list(pool(daemon)) == [second], every_s=0.2)
    workers_of = {q["worker"] for q in daemon.status()["queues"] if q["export"] == "vm0"}
    r.require(workers_of == set(pool(daemon).values()), f"queues: {workers_of}")
