"""The times of workers: an idle worker sleeps and is not woken, a loaded one is busy, and the times add up."""

import json
import time

import peer as p
import pytest
import rig as r

QUEUES = 16
# At least this part of an idle time is counted as such, on any machine.
MOST = 0.5


@pytest.fixture(scope="module")
def daemon(rig):
    daemon = r.Daemon(
        rig,
        "--disk=name=d0,format=null,size=1G", "--disk=name=d1,format=null,size=1G",
        f"--export=type=vhost-user-blk,name=idle,disk=d0,socket={rig.dir}/idle.sock,queues={QUEUES}",
        f"--export=type=vhost-user-blk,name=vm0,disk=d1,socket={rig.dir}/vm0.sock,queues=4",
    )
    yield daemon
    daemon.child.stop()


def worker(daemon, ident):
    (found,) = [w for w in daemon.status()["workers"] if w["id"] == ident]
    return found


def times(daemon, ident):
    """The three times of a worker in s, and the moments before and after they were read."""
    before = time.monotonic()
    w = worker(daemon, ident)
    return {key: w[f"{key}-us"] / 1e6 for key in ("busy", "polling", "sleeping")}, before, time.monotonic()


def grown(daemon, ident, wait_s, wanted=lambda growth: True):
    """Wait until the times of a worker grow as wanted in a while, and add up to it.

    None of them ever goes back. A worker that the machine interrupts when it falls asleep is shown a little too busy once, so
    that not all intervals add up.
    """
    growth = {}

    def add_up():
        first, earliest, begin = times(daemon, ident)
        time.sleep(wait_s)
        last, end, latest = times(daemon, ident)
        for key in first:
            r.require(last[key] >= first[key], f"{key} went back from {first[key]} to {last[key]}")
            growth[key] = last[key] - first[key]
        return end - begin - 1e-4 <= sum(growth.values()) <= latest - earliest + 1e-4 and wanted(growth)

    try:
        r.wait_for(f"the times of worker {ident} add up", add_up)
    except r.Failed as e:
        raise r.Failed(f"{e}: at last {growth} in {wait_s} s") from e


def sleeps_mostly(growth):
    return growth["sleeping"] > MOST * sum(growth.values())


def load(rig, *more):
    argv = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / "vm0.sock", "--rw", "randread", "--bs", "4k", "--quiet"]
    return r.Child(rig, "load", [*argv, "--runtime", r.FOREVER, *more])


def under_load(daemon, ident):
    before = worker(daemon, ident)["requests"]
    r.wait_for("the disk is loaded", lambda: worker(daemon, ident)["requests"] > before + 1000)


def sleeps_of(pid, tid):
    with open(f"/proc/{pid}/task/{tid}/status") as f:
        (line,) = [line for line in f if line.startswith("voluntary_ctxt_switches")]
    return int(line.split()[1])


def test_an_idle_worker_with_many_queues_sleeps_and_is_not_woken(rig, daemon):
    with p.Peer(f"{rig.dir}/idle.sock") as guest:
        r.require((guest.handshake(), guest.memory()) == (p.ACCEPTED, p.ACCEPTED), "the peer is refused")
        for index in range(QUEUES):
            guest.ring(index)
        running = [q for q in daemon.status()["queues"] if q["export"] == "idle" and q["state"] == "running"]
        r.require(len(running) == QUEUES, f"{len(running)} queues run")
        grown(daemon, 0, 2, sleeps_mostly)
        # Questions of commands wake the worker, to see that it runs.
        pid, tid = daemon.child.pid, worker(daemon, 0)["tid"]

        def is_left_alone():
            before = sleeps_of(pid, tid)
            time.sleep(2)
            return sleeps_of(pid, tid) == before

        r.wait_for("nothing wakes the idle worker for 2 s", is_left_alone)


def test_a_worker_under_load_is_busy(rig, daemon):
    ident = daemon.worker_new("--name", "loaded")
    for index in range(4):
        daemon.cli("attach", f"vm0:{index}", str(ident))
    child = load(rig, "--queues", "4", "--iodepth", "64")
    under_load(daemon, ident)
    # The rest is where load and worker share a CPU.
    grown(daemon, ident, 1, lambda growth: growth["busy"] > 0.1)

    def shown():
        """Shares of the worker's own time: they always add up."""
        rows = json.loads(daemon.cli("top", "--once", "--json", "--interval", "500ms").stdout)["workers"]
        shares = {w["id"]: [w[f"{key}-percent"] for key in ("busy", "polling", "sleeping")] for w in rows}
        r.require(all(99.9 < sum(of) < 100.1 for of in shares.values()), f"shares of the workers: {shares}")
        return shares[ident][0] > 10 and shares[0][2] > MOST * 100

    r.wait_for("top shows a busy worker and an idle one", shown)
    child.interrupt()
    lines = [line.split() for line in daemon.cli("status").stdout.splitlines()]
    (titles,) = [line for line in lines if line[:2] == ["WORKER", "NAME"]]
    row = dict(zip(titles, next(line for line in lines if line[:2] == [str(ident), "loaded"])))
    percent = [float(row[title].rstrip("%")) for title in ("BUSY", "POLLING", "SLEEPING")]
    r.require(99.7 < sum(percent) < 100.3 and percent[0] > 0, f"{row}")
    grown(daemon, ident, 0.1)


def test_polling_has_a_time_of_its_own(rig, daemon):
    ident = daemon.worker_new("--name", "polls", "--poll-us", "0")
    daemon.cli("attach", "vm0:0", str(ident))
    child = load(rig, "--queues", "1", "--iodepth", "1")
    under_load(daemon, ident)
    r.require(times(daemon, ident)[0]["polling"] == 0, "it polls without being allowed to")
    daemon.cli("worker", "set", str(ident), "--poll-us", "10000")
    r.wait_for("it polls", lambda: times(daemon, ident)[0]["polling"] > 0)
    child.interrupt()
    grown(daemon, ident, 0.5, sleeps_mostly)
