"""The comparison with other servers, `scripts/bench`: its options, the case `depth`, and the verdicts about the curve."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import rig as r

sys.path.insert(0, str(r.ROOT / "bench"))
import cases  # noqa: E402
import depth  # noqa: E402
import nbd  # noqa: E402
import resident  # noqa: E402
import spdk  # noqa: E402
from client import Client, ClientError, Job  # noqa: E402
from report import MET, MISSED, UNKNOWN, Cell, Target  # noqa: E402

BENCH = r.ROOT / "scripts" / "bench"


def bench(folder, *args, check=True):
    env = os.environ | {"VSHUNT_NO_INSTALL": "1", "VSHUNT_PEERS": str(folder)}
    return r.run([BENCH, *args], timeout_s=100, check=check, env=env)


def verdict(text, iops, cpu_us=0.1, spread=0.0):
    """The verdict whose sentence has `text`. `iops`: contestant -> job -> thousand IOPS, of three repetitions that differ by `spread`."""
    cells = {}
    for name, rows in iops.items():
        for job, value in rows.items():
            cell = cells[job, name] = Cell()
            for factor in (1 - spread, 1, 1 + spread):
                cell.add({"iops": value * factor * 1e3, "cpu_us": cpu_us, "p99_us": 10})
    jobs = [Job.parse(job) for job in depth.JOBS]
    found = [v for v in depth.verdicts(cells, jobs) if text in v[1]]
    r.require(len(found) == 1, f"{len(found)} sentences have {text!r}")
    return found[0]


def test_the_curve_may_fall_by_its_noise_only():
    flat = dict.fromkeys(depth.JOBS, 1000)
    text = "vshunt one worker do not fall"
    r.require(verdict(text, {"vshunt one worker": flat}) == (MET, f"IOPS of {text} with the depth (beyond the noise): 8 of 8"), "a flat curve")
    fall = flat | {"rr:32:1": 880}
    word, sentence = verdict(text, {"vshunt one worker": fall})
    r.require(word == MISSED and "7 of 8; short at rr:32:1 880k after 1,000k at rr:1:1" in sentence, sentence)
    # Half the span of the repetitions is more than the fall.
    r.require(verdict(text, {"vshunt one worker": fall}, spread=0.15)[0] == MET, "a fall within the noise")
    # Noise above a fifth is no excuse.
    r.require(verdict(text, {"vshunt one worker": flat | {"rr:32:1": 700}}, spread=0.5)[0] == MISSED, "a large fall beside large noise")
    # Each number of queues has its own curve.
    r.require(verdict(text, {"vshunt one worker": flat | {"rr:32:4": 100, "rr:128:4": 200}})[0] == MET, "fewer IOPS with more queues")


def test_ratios_are_judged_row_by_row():
    ours, theirs = dict.fromkeys(depth.JOBS, 940), dict.fromkeys(depth.JOBS, 1000)
    both = {"vshunt one worker": ours, "SPDK": theirs}
    word, sentence = verdict("x SPDK (depth 1: 0.9)", both)
    r.require(word == MISSED and ": 1 of 10; short at rr:2:1 x0.94," in sentence, sentence)
    r.require(verdict("x SPDK (depth 1: 0.9)", both | {"SPDK": ours})[0] == MET, "equal")
    r.require(verdict("latency at most 1.5 x SPDK", both)[0] == MET, "equal latencies")
    word, sentence = verdict("the storage daemon's", both)
    r.require((word, sentence) == (UNKNOWN, "IOPS of vshunt one worker at least the storage daemon's"), sentence)
    word, sentence = verdict("vshunt per-queue at least", {"vshunt one worker": theirs, "vshunt per-queue": {"rr:32:4": 950, "rr:128:4": 600}})
    r.require(word == MISSED and "1 of 2; short at rr:128:4 x0.60" in sentence, sentence)
    word, sentence = verdict("CPU an I/O of vshunt one worker", {"vshunt one worker": theirs}, cpu_us=0.4)
    r.require(word == MISSED and ": 0 of 7;" in sentence and "rr:4:1" not in sentence, sentence)


def test_a_target_against_several_counts_the_best_of_them():
    cells = {}
    for name, iops in (("vshunt", 100_000), ("native", 90_000), ("io_uring", 110_000)):
        cells["rr:32:1", name] = cell = Cell()
        cell.add({"iops": iops, "cpu_us": 1, "p99_us": 10})
    word, sentence = Target("rr:32:1", "vshunt", ("native", "io_uring"), "iops", 1).judge(cells)
    r.require((word, sentence) == (MISSED, "rr:32:1: IOPS of vshunt at least 1 x native or io_uring: x0.91 (100k to 110k)"), sentence)
    r.require(Target("rr:32:1", "vshunt", ("native", "not here"), "iops", 1).judge(cells)[0] == MET, "one of them was not measured")
    r.require(Target("rr:32:1", "vshunt", ("not here",), "iops", 1).judge(cells)[0] == UNKNOWN, "none was measured")


def test_an_idle_server_may_use_a_tick_and_nothing_else():
    # 10 s: one tick of 10 ms is 0.1 %. It may be of time before the window.
    r.require(resident.cpu_share(0.010, 0.000_2, 10) == pytest.approx(0.000_02), "a tick")
    r.require(resident.cpu_share(0.500, 0.000_2, 10) == pytest.approx(0.049), "a thread that ended")
    r.require(resident.cpu_share(0.010, None, 10) == pytest.approx(0.001), "a kernel without schedstat")
    r.require(f"{resident.IDLE_CPU_MAX * 0.99:.2%}" == "0.00%", f"{resident.IDLE_CPU_MAX}")


def test_servers_get_the_cpus_that_spdk_polls():
    r.require(cases.halves([0, 1], []) == ([0], [1]), "without SPDK")
    r.require(cases.halves([0, 1], spdk.cpus(1)) == ([1], [0]), "two CPUs")
    r.require(cases.halves([0, 1, 2, 3], spdk.cpus(7)) == ([3], [0, 1, 2]), "most of the CPUs")
    r.require(cases.halves([0, 1], spdk.cpus(3)) == (None, None), "all CPUs")


def test_results_of_bdevperf_are_read():
    text = (
        "\t VirtioBlk0           :       1.00  250000.00     976.56       0.00     0.00     127.90      90.00     400.00\n"
        "\r Total                       :             500000.00    1953.12 {failed:10.2f}     0.00     127.90      90.00     400.00\n"
        " Job: VirtioBlk0 (Core Mask 0x2)\n 50.00000% :   120.500us\n 99.00000% :   250.250us\n 99.50000% :   300.000us\n"
        " Job: VirtioBlk0 (Core Mask 0x4)\n 50.00000% :   118.000us\n 99.00000% :   260.000us\n 99.50000% :   310.000us\n"
    )
    result = spdk.bdevperf_result(text.format(failed=0), 2)
    r.require(result == {"iops": 500000.0, "ios": 1000000, "p50_us": 120.5, "p99_us": 260.0}, f"{result}")
    r.require(spdk.bdevperf_result(text.format(failed=3), 2) is None, "failed requests")
    r.require(spdk.bdevperf_result("", 2) is None, "no result")


def test_bdevperf_has_a_cpu_for_each_queue():
    tools = SimpleNamespace(bdevperf=["bdevperf"], spdk_mask=1)
    client = Client(tools, 1, 1, [0, 1, 2])
    r.require(client.lacks(Job.parse("rr:32:2")) is None, "two queues on CPUs 1 and 2")
    r.require("has 2" in client.lacks(Job.parse("rr:32:4")), "four queues")
    with pytest.raises(ClientError, match="has 2"):
        client.load_socket(Job.parse("rr:32:4"), None, None)


@pytest.mark.parametrize(
    "args, why",
    [
        (["--spdk", "/nowhere"], "no program /nowhere/build/bin/vhost; name the folder where SPDK is built"),
        (["--spdk-mask", "x"], "--spdk-mask"),
        (["--client", "bdevperf"], "name the folder where SPDK is built with --spdk"),
        (["--client", "vshunt-bench", "--wait", "loop"], "--wait loop is for fio, not for vshunt-bench"),
        (["--wait", "spin"], "--wait"),
        (["--only", "deep"], "no case deep"),
        (["--jobs", "rr:3:1"], "no job rr:3:1"),
    ],
)
def test_wrong_options_are_refused_first(rig, args, why):
    done = bench(rig.dir / "peers", *args, check=False)
    r.require(done.returncode == 2 and why in done.stderr, f"{done.returncode}: {done.stderr[-400:]}")
    r.require(not (rig.dir / "peers").exists(), "something was set up")


def test_an_spdk_that_does_not_run_is_refused(rig):
    program = rig.dir / "build" / "bin" / "vhost"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no library >&2\nexit 1\n")
    program.chmod(0o755)
    done = bench(rig.dir / "peers", "--spdk", rig.dir, "--only", "depth", "--client", "vshunt-bench", check=False)
    r.require(done.returncode == 1 and f"{program} does not run: no library" in done.stderr, f"{done.returncode}: {done.stderr[-400:]}")


def test_depth_prints_a_row_for_each_job(rig):
    r.binary("vshunt-bench")
    out = rig.dir / "out.json"
    jobs = ["rr:1:1", "rr:8:1", "rr:32:4"]
    # The client of this project, so that no other program is needed.
    done = bench(rig.dir / "peers", "--only", "depth", "--jobs", ",".join(jobs), "--reps", "1", "--time", "1", "--client", "vshunt-bench",
                 "--json", out)
    lines = done.stdout.splitlines()
    for job in jobs:
        # Two tables: IOPS and latencies.
        r.require(sum(line.split()[:1] == [job] for line in lines) == 2, f"no row for {job}: {done.stdout}")
    loads = {(load["job"], load["contestant"]): load for load in json.loads(out.read_text())["cases"]["depth"]["loads"]}
    r.require(all(loads[job, "vshunt one worker"][key] for job in jobs for key in ("iops", "p99_us")), f"{loads}")
    r.require(("rr:32:4", "vshunt per-queue") in loads and ("rr:8:1", "vshunt per-queue") not in loads, f"{loads.keys()}")
    r.require("CPU an I/O of vshunt one worker" in done.stdout and "do not fall" in done.stdout, done.stdout)


def nbd_verdicts(job, **figures):
    """The verdicts of one job of the case `nbd`. `figures`: (IOPS, CPU us an I/O) of the daemon, of one worker and of a worker for each queue."""
    names = {"daemon": cases.PEER, "one": cases.ONE, "each": cases.EACH}
    cells = {}
    for key, (iops, cpu_us) in figures.items():
        cells[job, names[key]] = cell = Cell()
        cell.add({"iops": iops, "cpu_us": cpu_us, "p99_us": 10})
    return [target.judge(cells)[0] for target in nbd.targets([Job.parse(job)])]


def test_disks_on_nbd_servers_are_judged_by_connections():
    r.require(nbd_verdicts("rr:32:1", daemon=(100, 8), one=(120, 9)) == [MET], "fast enough on one connection")
    r.require(nbd_verdicts("rr:32:1", daemon=(100, 8), one=(119, 1)) == [MISSED], "slower on one connection")
    r.require(nbd_verdicts("rw:32:4", daemon=(100, 8), one=(120, 8), each=(200, 4)) == [MET, MET, MET], "four connections")
    r.require(nbd_verdicts("rw:32:4", daemon=(100, 8), one=(90, 8), each=(199, 4.1)) == [MISSED, MISSED, MISSED], "short of each target")
    r.require(nbd_verdicts("rr:32:4", one=(100, 8), each=(200, 4)) == [UNKNOWN, UNKNOWN, UNKNOWN], "without a storage daemon")
    rates = ([100, 90, 300], [99, 100, 101])
    r.require(nbd.sequential_verdict(*rates)[0] == MET and nbd.sequential_verdict([101], [100])[0] == MISSED, "sequential reads")
    r.require(nbd.sequential_verdict([], [1])[0] == UNKNOWN, "without nbdcopy")


@pytest.mark.parametrize(("case", "program"), (("nbd", "nbdkit"), ("nbd-server", "fio")))
def test_disks_elsewhere_have_a_row_for_each_job(rig, case, program):
    path = r.tool(program, program)
    if case == "nbd-server" and r.run([path, "--enghelp=nbd"], check=False).returncode:
        raise r.Skipped("fio has no engine nbd (Debian's fio has)")
    r.binary("vshunt-bench")
    out = rig.dir / "out.json"
    jobs = ["rr:32:1", "rw:32:4"]
    options = ("--jobs", ",".join(jobs), "--reps", "1", "--time", "1", "--client", "vshunt-bench", "--json", out)
    done = bench(rig.dir / "peers", "--only", case, *options)
    lines = done.stdout.splitlines()
    for job in jobs:
        r.require(sum(line.split()[:1] == [job] for line in lines) == 2, f"no row for {job}: {done.stdout}")
    loads = {(load["job"], load["contestant"]): load for load in json.loads(out.read_text())["cases"][case]["loads"]}
    ours = [load for (_, name), load in loads.items() if name.startswith("vshunt")]
    r.require(len(ours) == 3 and all(load[key] for load in ours for key in ("iops", "cpu_us", "p99_us")), f"{loads}")
    # Whether the others are here or not: none of them fails.
    r.require(all(load["iops"] for load in loads.values()), f"{loads}")
    r.require(re.search("IOPS of vshunt per-queue at least [12] x storage daemon", done.stdout), done.stdout)
