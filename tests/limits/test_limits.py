"""Limits of operations and bytes per second, by the load that gets through.

A rate is a number of completed requests by the time in which they were counted: the behaviour that limits promise. The rates
are far below what one CPU can do. A test that misses one while the machine gave no CPU is left out, with that reason.
"""

import contextlib
import json
import re
import time

import pytest
import rates
import rig as r
from rates import close

DISK = "format=null,size=1G"
MIB = 1 << 20
pytestmark = pytest.mark.serial


@pytest.fixture(scope="module", autouse=True)
def _watched():
    """The machine, for rates that it may miss."""
    rates.watch()


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
    """How many requests an export has completed, and when that was known."""
    queues = daemon.status()["queues"]
    return sum(q["requests"] for q in queues if q["export"] == export), time.monotonic()


def rate(daemon, seconds, export="vm0"):
    """Requests per second that an export completes from now on."""
    before, since = requests(daemon, export)
    time.sleep(seconds)
    after, until = requests(daemon, export)
    return (after - before) / (until - since)


@contextlib.contextmanager
def load(daemon, at=0, *more, name="load"):
    """A load on an export in the background."""
    child = r.Child(daemon.rig, f"{daemon.name}-{name}{at}", bench(daemon, at, "--runtime", r.FOREVER, *more))
    export = f"vm{at}"
    r.wait_for(f"{export} has requests", lambda: requests(daemon, export)[0] > 0)
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


@pytest.mark.parametrize(("case", "queues"), [("iops", 1), ("bps", 1), *((case, 4) for case in CASES)])
def test_a_rate_is_kept(rig, case, queues):
    limits, arguments, wanted = CASES[case]
    daemon = served(rig, f"rate-{case}-{queues}", limits)
    result = measured(daemon, 0, "--runtime", "5s", "--queues", str(queues), "--iodepth", "16", *arguments)
    close(f"{case} at {queues} queues", ios(result) / result["seconds"], wanted, 3)
    queues = [q for q in daemon.status()["queues"] if q["requests"]]
    r.require(all(q["limited-us"] > 100_000 for q in queues), f"status does not show the wait: {queues}")


def test_reads_and_writes_have_limits_of_their_own(rig):
    daemon = served(rig, "both", "limits.iops-read=1000,limits.iops-write=500")
    with load(daemon, 0, "--rw", "randread", "--queues", "4"):
        close("reads", rate(daemon, 3), 1000, 4)
    result = measured(daemon, 0, "--rw", "randwrite", "--runtime", "5s", "--queues", "2")
    close("writes", ios(result) / result["seconds"], 500, 3)


def test_a_burst_lasts_as_long_as_it_may(rig):
    daemon = served(rig, "burst", "limits.iops=500,limits.burst-iops=4000:2s")
    result = measured(daemon, 0, "--rw", "randread", "--runtime", "6s", "--queues", "2")
    # 4000 for 2 s are the bucket, 500 a second leak out of it.
    close("requests of a burst and after it", ios(result), 8000 + 500 * result["seconds"], 4)
    daemon.cli("limit", "vm0", "--iops", "500", "--burst-iops", "4000")
    result = measured(daemon, 0, "--rw", "randread", "--ios", "4000")
    r.require(result["seconds"] < 4, f"a burst of a second, {result['seconds']} s long, is none")


def test_limits_are_set_and_lifted_under_load(rig):
    daemon = served(rig, "set")
    with load(daemon, 0, "--rw", "randrw", "--queues", "4") as child:
        free = rate(daemon, 1)
        r.require(free > 6000, f"without limits {free}")
        for wanted in (1000, 4000):
            daemon.cli("limit", "vm0", "--iops", str(wanted))
            time.sleep(0.5)
            close(f"--iops {wanted}", rate(daemon, 3), wanted, 4)
            r.require(f"iops {wanted}" in daemon.cli("limit", "vm0").stdout, daemon.cli("limit", "vm0").stdout)
        daemon.cli("limit", "vm0", "--bps", "1", "--iops", "1")
        time.sleep(0.5)
        r.require(rate(daemon, 1) <= 2, "nothing should pass")
        daemon.cli("limit", "vm0", "--off")
        time.sleep(0.5)
        again = rate(daemon, 1)
        r.require(again > 6000, f"after --off {again}")
        r.require("no limits" in daemon.cli("limit", "vm0").stdout, "limits are left")
        r.require(child.running(), child.tail())


def test_a_queue_that_moves_keeps_its_budget(rig):
    daemon = served(rig, "moves", "limits.iops=3000", disk="format=ram,size=64M")
    others = [daemon.worker_new(), daemon.worker_new()]
    with load(daemon, 0, "--rw", "randrw", "--queues", "4", "--verify") as child:
        turn = [0]

        def move():
            turn[0] += 1
            daemon.cli("attach", "vm0:0-3", str(others[turn[0] % 2]))
            time.sleep(0.1)

        moving = r.Repeating(move)
        close("while the queues move", rate(daemon, 5), 3000, 3)
        moving.stop()
        r.require(turn[0] > 5, f"only {turn[0]} moves")
        daemon.cli("limit", "vm0", "--off")
        r.require(child.interrupt() == 0, child.tail())


def test_members_of_a_group_share_alike(rig):
    """One has a queue and few requests, the other four queues and many."""
    daemon = served(rig, "group", "limits.iops=4000,limits.group=tenant", "limits.group=tenant", exports=2)
    few, many = ("--queues", "1", "--iodepth", "16"), ("--queues", "4", "--iodepth", "64")
    with load(daemon, 0, *few, "--rw", "randread"), load(daemon, 1, *many, "--rw", "randrw"):
        time.sleep(0.5)
        first, second, since = requests(daemon)[0], requests(daemon, "vm1")[0], time.monotonic()
        time.sleep(5)
        first, second = requests(daemon)[0] - first, requests(daemon, "vm1")[0] - second
        close("all of them", (first + second) / (time.monotonic() - since), 4000, 4)
        close("one and the other", first, second, 10)
        daemon.cli("worker", "new")
        daemon.cli("attach", "vm1", "1")
        time.sleep(0.5)
        first, second = requests(daemon)[0], requests(daemon, "vm1")[0]
        time.sleep(5)
        close("on two workers", requests(daemon)[0] - first, requests(daemon, "vm1")[0] - second, 10)
        table = daemon.cli("status").stdout
        r.require(len(re.findall(r"vm[01] +tenant +iops 4000 ", table)) == 2, f"status: {table}")
    # Alone, a member gets all of it.
    with load(daemon, 1, "--rw", "randread", name="alone"):
        close("alone in its group", rate(daemon, 3, "vm1"), 4000, 4)
    daemon.cli("limit", "vm0", "--iops", "700", "--group", "tenant")
    limits = {e["name"]: e["limits"] for e in daemon.status()["exports"]}
    r.require(limits == {f"vm{at}": {"iops": 700, "group": "tenant"} for at in (0, 1)}, f"the group has {limits}")


def test_bytes_are_shared_alike_by_small_and_large_requests(rig):
    daemon = served(rig, "bytes", "limits.bps=100M,limits.group=g", "limits.group=g", exports=2)
    with load(daemon, 0, "--rw", "randread", "--bs", "4k"), load(daemon, 1, "--rw", "randread", "--bs", "1M"):
        time.sleep(0.5)
        small, large = requests(daemon)[0], requests(daemon, "vm1")[0]
        time.sleep(5)
        small, large = (requests(daemon)[0] - small) * 4096, (requests(daemon, "vm1")[0] - large) * MIB
        close("bytes of small and of large requests", small, large, 10)


def test_flushes_pass(rig):
    """A flush waits at most for the writes in front of it, and its queue continues."""
    daemon = served(rig, "flush", "limits.iops=400")
    result = measured(daemon, 0, "--rw", "randwrite", "--runtime", "4s", "--flush-every", "1", "--queues", "2", "--iodepth", "4")
    r.require(result["flush"]["ios"] > 1000, f"{result['flush']['ios']} flushes in 4 s beside 400 writes a second")
    close("writes", ios(result) / result["seconds"], 400, 4)


def test_no_queue_starves_at_a_low_rate(rig):
    daemon = served(rig, "turns", "limits.iops=100")
    with load(daemon, 0, "--rw", "randread", "--queues", "4", "--stall", "60s"):
        time.sleep(5)
        done = [q["requests"] for q in daemon.status()["queues"]]
        close("requests of the queue with the fewest", min(done), max(done), 50)


def test_a_queue_that_waits_uses_no_cpu(rig):
    daemon = served(rig, "idle", "limits.iops=1")
    with load(daemon, 0, "--rw", "randread", "--queues", "4", "--stall", "60s"):
        used = [w["cpu-time-us"] for w in daemon.status()["workers"]]
        time.sleep(2)
        used = [w["cpu-time-us"] - before for w, before in zip(daemon.status()["workers"], used)]
        r.require(max(used) < 200_000, f"the worker used {used} us of 2 s")
        r.wait_for("a queue waits now", lambda: any(q["limited"] for q in daemon.status()["queues"]))
        # And so does `top`.
        view = json.loads(daemon.cli("top", "--once", "--json", "--interval", "500ms").stdout)
        r.require(view["exports"][0]["limited"] and view["exports"][0]["limited-percent"] > 50, f"top: {view['exports']}")
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
    shown = daemon.cli("config", "show").stdout
    file = rig.dir / "qemu.toml"
    file.write_text(shown.replace("qemu.ctl", "again.ctl"))
    r.require("[export.limits]" in shown, shown)
    daemon.cli("config", "check", str(file))
    zero = {key: 0 for key in ("bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr")}
    daemon.cli("qmp", "block_set_io_throttle", json.dumps({"device": "vm0", **zero}))
    r.require(daemon.status()["exports"][0].get("limits") is None, "limits of 0 are left")


def test_a_limited_guest_may_go_at_any_time(rig):
    """Killed, removed, reset; and the daemon ends at once."""
    daemon = served(rig, "gone")
    for _ in range(3):
        with load(daemon, 0, "--rw", "randrw", "--queues", "4"):
            daemon.cli("limit", "vm0", "--bps", "1")
            time.sleep(0.2)
        daemon.cli("limit", "vm0", "--off")
    with load(daemon, 0, "--rw", "randrw", "--queues", "4"):
        daemon.cli("limit", "vm0", "--bps", "1")
        time.sleep(0.2)
        daemon.cli("attach", "vm0:0-3", str(daemon.worker_new()))
        daemon.cli("export", "remove", "--force", "vm0")
    daemon.cli("export", "add", f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/gone0.sock,queues=4")
    with load(daemon, 0, "--rw", "randrw", "--queues", "4"):
        daemon.cli("limit", "vm0", "--iops", "1")
        time.sleep(0.2)
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
            time.sleep(0.3)
            daemon.child.kill()
            daemon.start()
        r.wait_for("it has requests again", lambda: requests(daemon)[0] > 100)
        daemon.cli("limit", "vm0", "--off")
        r.require(child.interrupt() == 0, child.tail())
