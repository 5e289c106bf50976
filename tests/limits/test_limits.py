"""Limits of operations and bytes per second, by the load that gets through.

A rate is a number of completed requests by the time in which they were counted: the behaviour that limits promise. The rates
are far below what one CPU can do: tests/lib/rates.py says what fails on any machine.
"""

import contextlib
import itertools
import json
import re
import time

import pytest
import rig as r
from rates import Counted, alike, at_least, at_most, below, close, during, needs_cpu

DISK = "format=null,size=1G"
MIB = 1 << 20

def served(rig, name, *limits, queues=4, exports=1, disk=DISK):
    """A daemon with exports vm0, vm1 …, each of a disk of its own. `limits`: keys of each export."""
    arguments = []
    for at in range(exports):
        keys = f"type=vhost-user-blk,name=vm{at},disk=d{at},socket={rig.dir}/{name}{at}.sock,queues={queues}"
        own = limits[at] if at < len(limits) else ""
        arguments += ["--disk", f"name=d{at},{disk}", "--export", f"{keys},{own}".rstrip(",")]
    return r.Daemon(rig, *arguments, name=name)


def bench(daemon, at=0, *more):
    """The command line of a load on an export."""
    socket = daemon.rig.dir / f"{daemon.name}{at}.sock"
    return [r.binary("vshunt-bench"), "blk", "--socket", socket, "--quiet", "--json", *more]


def measured(daemon, at=0, *more, timeout_s=r.WAIT_S):
    return json.loads(r.run(bench(daemon, at, *more), timeout_s=timeout_s).stdout)


def ios(result):
    return result["read"]["ios"] + result["write"]["ios"]


def requests(daemon, export="vm0"):
    """How many requests an export has completed."""
    return sum(q["requests"] for q in daemon.status()["queues"] if q["export"] == export)


def counted(daemon, seconds, *exports, enough=lambda: True):
    """Requests that exports complete from now on, for some seconds and until it is enough. Their sum, and of each."""

    def seen():
        begin = time.monotonic()
        queues = daemon.status()["queues"]
        return [sum(q["requests"] for q in queues if q["export"] == export) for export in exports or ("vm0",)], begin, time.monotonic()

    before, earliest, since = seen()
    time.sleep(seconds)
    r.wait_for("enough has happened", enough)
    after, until, latest = seen()
    each = [b - a for a, b in zip(before, after)]
    return Counted(sum(each), until - since, latest - earliest), each


def rate(daemon, seconds, export="vm0", **more):
    """Requests that an export completes from now on."""
    return counted(daemon, seconds, export, **more)[0]


def fast(daemon, wanted):
    """Wait until vm0 completes more requests than that in a second."""
    r.wait_for(f"more than {wanted} requests in a second", lambda: rate(daemon, 0.5).per_second() > wanted)


def held_back(daemon):
    """Wait until a queue waits for its limits."""
    r.wait_for("a queue waits for its limits", lambda: any(q["limited"] for q in daemon.status()["queues"]))


@contextlib.contextmanager
def load(daemon, at=0, *more, name="load"):
    """A load on an export in the background."""
    child = r.Child(daemon.rig, f"{daemon.name}-{name}{at}", bench(daemon, at, "--runtime", r.FOREVER, *more))
    export = f"vm{at}"
    r.wait_for(f"{export} has requests", lambda: requests(daemon, export) > 0)
    yield child
    child.kill()


CASES = {
    "iops": ("limits.iops=3000", ["--rw", "randrw"], 3000),
    "iops-read": ("limits.iops-read=2000", ["--rw", "randread"], 2000),
    "bps": ("limits.bps=64M", ["--rw", "randrw", "--bs", "64k"], 1024),
    "bps-write": ("limits.bps-write=32M", ["--rw", "randwrite", "--bs", "1M"], 32),
    "packed": ("limits.iops=3000", ["--rw", "randrw", "--packed"], 3000),
    "iops-size": ("limits.iops=4000,limits.iops-size=4K", ["--rw", "randread", "--bs", "16k"], 1000),
}


@pytest.mark.paced
@pytest.mark.parametrize(("case", "queues"), [("iops", 1), ("bps", 1), *((case, 4) for case in CASES)])
def test_a_rate_is_kept(rig, case, queues):
    limits, arguments, wanted = CASES[case]
    daemon = served(rig, f"rate-{case}-{queues}", limits)
    result = measured(daemon, 0, "--runtime", "5s", "--queues", str(queues), "--iodepth", "16", *arguments)
    close(f"{case} at {queues} queues", during(ios(result), result["seconds"]), wanted)
    queues = [q for q in daemon.status()["queues"] if q["requests"]]
    needs_cpu(all(q["limited-us"] > 100_000 for q in queues), f"status does not show the wait: {queues}")


@pytest.mark.paced
def test_reads_and_writes_have_limits_of_their_own(rig):
    daemon = served(rig, "both", "limits.iops-read=1000,limits.iops-write=500")
    with load(daemon, 0, "--rw", "randread", "--queues", "4"):
        close("reads", rate(daemon, 3), 1000)
    result = measured(daemon, 0, "--rw", "randwrite", "--runtime", "5s", "--queues", "2")
    close("writes", during(ios(result), result["seconds"]), 500)


@pytest.mark.paced
def test_a_burst_lasts_as_long_as_it_may(rig):
    daemon = served(rig, "burst", "limits.iops=500,limits.burst-iops=4000:2s")
    result = measured(daemon, 0, "--rw", "randread", "--runtime", "6s", "--queues", "2")
    # 4000 for 2 s are the bucket, 500 a second leak out of it.
    allowed = 8000 + 500 * result["seconds"]
    at_most("requests of a burst and after it", ios(result), allowed + 4)
    at_least("requests of a burst and after it", ios(result), allowed)
    # Other limits keep what was used. New ones begin with an empty bucket.
    daemon.cli("limit", "vm0", "--off")
    daemon.cli("limit", "vm0", "--iops", "500", "--burst-iops", "4000")
    result = measured(daemon, 0, "--rw", "randread", "--ios", "4000")
    needs_cpu(result["seconds"] < 4, f"a burst of a second, {result['seconds']} s long, is none")


@pytest.mark.paced
def test_limits_are_set_and_lifted_under_load(rig):
    daemon = served(rig, "set")
    with load(daemon, 0, "--rw", "randrw", "--queues", "4") as child:
        fast(daemon, 6000)
        for wanted in (1000, 4000):
            daemon.cli("limit", "vm0", "--iops", str(wanted))
            held_back(daemon)
            time.sleep(0.5)
            close(f"--iops {wanted}", rate(daemon, 3), wanted)
            r.require(f"iops {wanted}" in daemon.cli("limit", "vm0").stdout, daemon.cli("limit", "vm0").stdout)
        daemon.cli("limit", "vm0", "--bps", "1", "--iops", "1")
        held_back(daemon)
        time.sleep(0.5)
        below("nothing passes", rate(daemon, 1), 1)
        daemon.cli("limit", "vm0", "--off")
        fast(daemon, 6000)
        r.require("no limits" in daemon.cli("limit", "vm0").stdout, "limits are left")
        r.require(child.running(), child.tail())


@pytest.mark.paced
def test_a_queue_that_moves_keeps_its_budget(rig):
    daemon = served(rig, "moves", "limits.iops=3000", disk="format=ram,size=64M")
    others = [daemon.worker_new(), daemon.worker_new()]
    with load(daemon, 0, "--rw", "randrw", "--queues", "4", "--verify") as child:
        turn = itertools.cycle(others)

        def move():
            daemon.attach("vm0:0-3", next(turn))
            time.sleep(0.1)

        moving = r.Repeating(move)
        passed = rate(daemon, 5, enough=lambda: moving.error or moving.turns > 5)
        moving.stop()
        close("while the queues move", passed, 3000)
        daemon.cli("limit", "vm0", "--off")
        r.require(child.interrupt() == 0, child.tail())


@pytest.mark.paced
def test_members_of_a_group_share_alike(rig):
    """One has a queue and few requests, the other four queues and many."""
    daemon = served(rig, "group", "limits.iops=4000,limits.group=tenant", "limits.group=tenant", exports=2)
    few, many = ("--queues", "1", "--iodepth", "16"), ("--queues", "4", "--iodepth", "64")
    with load(daemon, 0, *few, "--rw", "randread"), load(daemon, 1, *many, "--rw", "randrw"):
        time.sleep(0.5)
        both, each = counted(daemon, 5, "vm0", "vm1")
        close("all of them", both, 4000)
        alike("one and the other", *each, 10)
        daemon.cli("worker", "new")
        daemon.attach("vm1", 1)
        time.sleep(0.5)
        both, each = counted(daemon, 5, "vm0", "vm1")
        close("all of them on two workers", both, 4000)
        alike("one and the other on two workers", *each, 10)
        table = daemon.cli("status").stdout
        r.require(len(re.findall(r"vm[01] +tenant +iops 4000 ", table)) == 2, f"status: {table}")
    # Alone, a member gets all of it.
    with load(daemon, 1, "--rw", "randread", name="alone"):
        close("alone in its group", rate(daemon, 3, "vm1"), 4000)
    daemon.cli("limit", "vm0", "--iops", "700", "--group", "tenant")
    limits = {e["name"]: e["limits"] for e in daemon.status()["exports"]}
    r.require(limits == {f"vm{at}": {"iops": 700, "group": "tenant"} for at in (0, 1)}, f"the group has {limits}")


def test_members_and_limits_that_come_again_give_no_burst(rig):
    daemon = served(rig, "again", "limits.iops=200,limits.burst-iops=2000:2s,limits.group=g", exports=2)
    turn = [0]

    def change():
        turn[0] += 1
        # The other one, which is idle, joins and leaves.
        daemon.cli("limit", "vm1", *(["--group", "g"] if turn[0] % 2 else ["--off"]))
        # The same again, and others.
        more = ["--iops", str(200 + turn[0] % 2), "--burst-iops", "2000:2s"] if turn[0] % 3 == 0 else []
        daemon.cli("limit", "vm0", *more, "--group", "g")

    since = time.monotonic()
    with load(daemon, 0, "--rw", "randread", "--queues", "4", "--stall", "60s"):
        # As many as the bucket has room for.
        r.wait_for("the burst is over", lambda: requests(daemon) > 4000)
        changing = r.Repeating(change)
        r.wait_for("changes", lambda: changing.error or turn[0] > 12)
        changing.stop()
        # Each new burst would be 4000 more.
        at_most("beside changes", requests(daemon), 4000 + 201 * (time.monotonic() - since) + 100)


@pytest.mark.paced
def test_bytes_are_shared_alike_by_small_and_large_requests(rig):
    daemon = served(rig, "bytes", "limits.bps=100M,limits.group=g", "limits.group=g", exports=2)
    with load(daemon, 0, "--rw", "randread", "--bs", "4k"), load(daemon, 1, "--rw", "randread", "--bs", "1M"):
        time.sleep(0.5)
        passed, (small, large) = counted(daemon, 5, "vm0", "vm1")
        small, large = small * 4096, large * MIB
        close("bytes", Counted(small + large, *passed[1:]), 100 * MIB, MIB)
        alike("bytes of small and of large requests", small, large, 10)


@pytest.mark.paced
def test_flushes_pass(rig):
    """A flush waits at most for the writes in front of it, and its queue continues."""
    daemon = served(rig, "flush", "limits.iops=400")
    result = measured(daemon, 0, "--rw", "randwrite", "--runtime", "4s", "--flush-every", "1", "--queues", "2", "--iodepth", "4")
    # If flushes counted as operations, half as many writes would pass.
    flushes = result["flush"]["ios"]
    r.require(flushes >= ios(result) - 2 * 4, f"{flushes} flushes beside {ios(result)} writes, of which each has one")
    close("writes", during(ios(result), result["seconds"]), 400)


@pytest.mark.paced
def test_no_queue_starves_at_a_low_rate(rig):
    daemon = served(rig, "turns", "limits.iops=100")
    with load(daemon, 0, "--rw", "randread", "--queues", "4", "--stall", "60s"):
        r.wait_for("500 requests", lambda: requests(daemon) >= 500)
        done = [q["requests"] for q in daemon.status()["queues"]]
        alike("requests of the queue with the fewest and of the one with the most", min(done), max(done), 50)


def test_a_queue_that_waits_uses_no_cpu(rig):
    daemon = served(rig, "idle", "limits.iops=1")
    with load(daemon, 0, "--rw", "randread", "--queues", "4", "--stall", "60s"):
        since = time.monotonic()
        used = [w["cpu-time-us"] for w in daemon.status()["workers"]]
        time.sleep(2)
        used = [w["cpu-time-us"] - before for w, before in zip(daemon.status()["workers"], used)]
        lasted = time.monotonic() - since
        r.require(max(used) < 100_000 * lasted, f"the worker used {used} us of {lasted:.1f} s")
        held_back(daemon)

        # `top` shows it, too. The interval is one of its own clock.
        def most_of_the_time():
            (export,) = json.loads(daemon.cli("top", "--once", "--json", "--interval", "500ms").stdout)["exports"]
            return export["limited"] and export["limited-percent"] > 50

        r.wait_for("top shows that the queue waits for most of the time", most_of_the_time)
        text = daemon.cli("top", "--once", "--interval", "500ms").stdout
        r.require("limited" in text and "LIM%" in text, text)
    r.wait_for("no queue waits without load", lambda: not any(q["limited"] for q in daemon.status()["queues"]))


WRONG = [
    (["--iops", "0"], "out of range"),
    (["--iops", "-1"], "--iops"),
    (["--iops", "5K"], "--iops"),
    (["--bps", "18446744073709551616"], "--bps"),
    (["--bps", "18446744073709551615"], "out of range"),
    (["--bps", "17E"], "--bps"),
    (["--iops", "10", "--burst-iops", "5"], "--burst-iops 5 is less than"),
    (["--burst-iops", "5"], "give --iops too"),
    (["--iops", "10", "--burst-iops", "10:0s"], "1 second"),
    (["--iops", "10", "--burst-iops", "10:99999999999999999s"], "at most"),
    (["--iops", "10", "--burst-iops", "x:1s"], "is not a burst"),
    (["--bps", "10", "--iops-size", "4k"], "give --iops too"),
    (["--iops", "10", "--group", "a b"], "group name"),
    (["--group", "nobodys"], "no group nobodys"),
    (["--iops", "10", "--off"], "cannot be used with"),
]


def test_wrong_limits_are_refused(rig):
    daemon = served(rig, "wrong")
    for arguments, said in WRONG:
        r.message_of(daemon.cli("limit", "vm0", *arguments, check=False), said)
    r.message_of(daemon.cli("limit", "vm7", "--iops", "1", check=False), "vm7")
    r.require(daemon.status()["exports"][0].get("limits") is None, "a refused limit is there")
    for limits in ({"iops": -1}, {"iops": 1.5}, {"iops": 2**64}, {"bps": 0}, {"burst-iops": "5"}, {"iop": 5}, {}, []):
        arguments = json.dumps({"name": "vm0", "limits": limits})
        r.require(daemon.cli("qmp", "export-limit", arguments, check=False).returncode == 1, f"{arguments} is accepted")
    for keys in ("limits.iops=0", "limits.iops=-1", "limits.iosp=5", "limits=5", "limits.iops=5,engine=kernel", "limits.=5"):
        export = f"type=vhost-user-blk,name=x,disk=d0,socket={rig.dir}/x.sock,{keys}"
        r.message_of(daemon.cli("export", "add", export, check=False))


def test_qemus_command_sets_limits(rig):
    daemon = served(rig, "qemu")
    arguments = {"id": "vm0", "bps": 0, "bps_rd": 0, "bps_wr": 1000000, "iops": 500, "iops_rd": 0, "iops_wr": 0,
                 "iops_max": 900, "iops_max_length": 3, "iops_size": 8192, "group": "g"}
    daemon.cli("qmp", "block_set_io_throttle", json.dumps(arguments))
    limits = daemon.status()["exports"][0]["limits"]
    wanted = {"iops": 500, "bps-write": 1000000, "burst-iops": "900:3s", "iops-size": 8192, "group": "g"}
    r.require(limits == wanted, f"limits: {limits}")
    # As QEMU's clients read them: those of the device that has this id.
    by_name = {device["device"]: device["inserted"] for device in json.loads(daemon.cli("qmp", "query-block").stdout)}
    read = {name: by_name["vm0"].get(name, 0) for name in arguments if name != "id"}
    r.require(read == {name: value for name, value in arguments.items() if name != "id"}, f"query-block: {by_name['vm0']}")
    r.require(by_name["vm0"]["node-name"] == "d0" and "bps_max" not in by_name["vm0"], f"{by_name['vm0']}")
    shown = daemon.cli("config", "show").stdout
    file = rig.dir / "qemu.toml"
    file.write_text(shown.replace("qemu.ctl", "again.ctl"))
    r.require("[export.limits]" in shown, shown)
    daemon.cli("config", "check", str(file))
    zero = {key: 0 for key in ("bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr")}
    daemon.cli("qmp", "block_set_io_throttle", json.dumps({"device": "vm0", **zero}))
    r.require(daemon.status()["exports"][0].get("limits") is None, "limits of 0 are left")
    devices = json.loads(daemon.cli("qmp", "query-block").stdout)
    r.require(all(device["inserted"]["iops"] == 0 and "group" not in device["inserted"] for device in devices), f"{devices}")


def test_a_limited_guest_may_go_at_any_time(rig):
    """Killed, removed, reset; and the daemon ends at once."""
    daemon = served(rig, "gone")
    for _ in range(3):
        with load(daemon, 0, "--rw", "randrw", "--queues", "4"):
            daemon.cli("limit", "vm0", "--bps", "1")
            held_back(daemon)
        daemon.cli("limit", "vm0", "--off")
    with load(daemon, 0, "--rw", "randrw", "--queues", "4"):
        daemon.cli("limit", "vm0", "--bps", "1")
        held_back(daemon)
        daemon.cli("attach", "vm0:0-3", str(daemon.worker_new()))
        daemon.cli("export", "remove", "--force", "vm0")
    daemon.cli("export", "add", f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/gone0.sock,queues=4")
    with load(daemon, 0, "--rw", "randrw", "--queues", "4"):
        daemon.cli("limit", "vm0", "--iops", "1")
        held_back(daemon)
        daemon.cli("quit", "--force")
        r.require(daemon.child.wait() == 0, daemon.child.tail())


@pytest.mark.parametrize("packed", [(), ("--packed",)], ids=["split", "packed"])
def test_a_daemon_that_is_killed_while_it_limits_loses_no_request(rig, packed):
    name = f"killed{len(packed)}"
    image = rig.image(f"{name}.img", 256 * MIB)
    keys = f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/{name}0.sock,queues=2,limits.iops=1000"
    daemon = r.Daemon(rig, "--disk", f"name=d0,file={image}", "--export", keys, name=name)
    with load(daemon, 0, "--rw", "randrw", "--queues", "2", "--verify", "--reconnect", "60s", *packed) as child:
        for _ in range(4):
            held_back(daemon)
            daemon.child.kill()
            daemon.start()
        r.wait_for("it has requests again", lambda: requests(daemon) > 100)
        daemon.cli("limit", "vm0", "--off")
        r.require(child.interrupt() == 0, child.tail())
