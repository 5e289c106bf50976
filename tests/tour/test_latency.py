"""Service times: what `status`, `top`, QMP and the metrics show of them, and that each request counts once."""

import json
import socket
import time

import pytest
import rig as r

MIB = 1 << 20
# How often queues move under one load.
MOVES = 12


def export(rig, name, latency):
    socket = f"{rig.dir}/{name}.sock"
    return ("--disk", f"name={name},format=null,size=1G",
            "--export", f"name={name},disk={name},socket={socket},queues=4,latency={latency}")


def bench(rig, name, *more):
    argv = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / f"{name}.sock", "--bs", "4k", "--quiet", *more]
    return r.Child(rig, f"load-{name}", argv)


def of(daemon, name):
    (found,) = [e for e in daemon.status()["exports"] if e["name"] == name]
    return found


def scrape(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
        s.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = b""
        while more := s.recv(1 << 16):
            text += more
    return dict(line.rsplit(" ", 1) for line in text.decode().split("\r\n\r\n", 1)[1].splitlines() if line and line[0] != "#")


@pytest.fixture(scope="module")
def daemon(rig):
    exports = [argument for mode in ("on", "sampled", "off") for argument in export(rig, mode, mode)]
    daemon = r.Daemon(rig, *exports, f"--metrics=unix:{rig.dir}/metrics")
    yield daemon
    daemon.child.stop()


def test_each_request_counts_once_while_queues_move(rig, daemon):
    workers = [daemon.worker_new() for _ in range(2)]
    load = bench(rig, "on", "--rw", "randrw", "--flush-every", "100", "--queues", "2", "--iodepth", "4", "--runtime", r.FOREVER)

    def loaded(counts):
        """Whether both queues have more requests than before, of each kind."""
        now = [[q[kind] for kind in ("reads", "writes", "flushes")] for q in of(daemon, "on")["queue-list"][:2]]
        return all(b > a for before, after in zip(counts, now) for a, b in zip(before, after)) and now

    counts = r.wait_for("both queues are loaded", lambda: loaded([[0] * 3] * 2))
    for turn in range(MOVES):
        daemon.attach(f"on:{turn % 2}", workers[turn // 2 % 2])
    r.wait_for("both queues are loaded after their moves", lambda: loaded(counts))
    r.require(load.interrupt() == 0, load.tail())
    whole = of(daemon, "on")
    queues = [q for q in whole["queue-list"] if q["requests"]]
    r.require(len(queues) == 2, f"queues with requests: {queues}")
    for q in queues:
        kinds = {kind: q["service-times"].get(kind, {"count": 0})["count"] for kind in ("read", "write", "flush", "other")}
        r.require(sum(kinds.values()) == q["requests"], f"{q['requests']} requests, and {kinds} measured")
        r.require((kinds["read"], kinds["write"], kinds["flush"]) == (q["reads"], q["writes"], q["flushes"]), f"{q} and {kinds}")
        r.require(all("bins" not in q["service-times"][kind] for kind in ("read", "write", "flush")), "a list has bins without being asked")
    reads = whole["service-times"]["read"]
    r.require(reads["count"] == sum(q["reads"] for q in queues), f"{reads} and {queues}")
    r.require(0 < reads["p50-ns"] <= reads["p99-ns"] <= reads["max-ns"], f"{reads}")

    # The counters survive the front end. Each way of asking shows the same.
    load = bench(rig, "on", "--rw", "randread", "--ios", 1000)
    r.require(load.wait() == 0, load.tail())
    count = of(daemon, "on")["service-times"]["read"]["count"]
    r.require(count == reads["count"] + 1000, f"{count} after {reads['count']} and 1000 more")
    asked = json.loads(daemon.cli("qmp", "query-queues", '{"export": "on", "histograms": true}').stdout)
    r.require(sum(n for q in asked if "service-times" in q for _, n in q["service-times"]["read"]["bins"]) == count, f"{asked}")
    blocks = json.loads(daemon.cli("qmp", "query-blockstats").stdout)
    (stats,) = [b["stats"] for b in blocks if b["device"] == "on"]
    r.require(stats["rd_operations"] == count and stats["rd_total_time_ns"] > 0, f"{stats}")
    r.require(sum(stats["rd_latency_histogram"]["bins"]) == count, f"{stats}")
    nodes = json.loads(daemon.cli("qmp", "query-blockstats", '{"query-nodes": true}').stdout)
    r.require([n["stats"] for n in nodes if n["node-name"] == "on"] == [stats], f"{nodes}")
    metrics = scrape(rig.dir / "metrics")
    series = {key: value for key, value in metrics.items() if key.startswith("vshunt_export_latency_seconds") and 'export="on"' in key}
    r.require(series['vshunt_export_latency_seconds_count{export="on",operation="read"}'] == str(count), f"{series}")
    r.require(series['vshunt_export_latency_seconds_bucket{le="+Inf",export="on",operation="read"}'] == str(count), f"{series}")
    r.require(len(series) == 4 * 30, f"{len(series)} series of one export")
    text = daemon.cli("status").stdout
    rows = [line.split() for line in text.splitlines() if line.startswith("on ")]
    r.require(["read", str(count)] in [row[1:3] for row in rows], text)
    r.require(all(len(line) <= 80 for line in text.splitlines() if "P99" in line or line.split()[1:2] == ["read"]), text)


def test_sampled_is_a_part_and_off_is_nothing(rig, daemon):
    for name in ("sampled", "off"):
        load = bench(rig, name, "--rw", "randread", "--iodepth", "1", "--ios", 4000)
        r.require(load.wait() == 0, load.tail())
    sampled, off = of(daemon, "sampled"), of(daemon, "off")
    count = sampled["service-times"]["read"]["count"]
    r.require(0 < count < 2000, f"{count} of 4000 requests were sampled")
    r.require(sampled["service-times"]["mode"] == "sampled" and "read, sampled" in daemon.cli("status").stdout, f"{sampled}")
    r.require("service-times" not in off and all("service-times" not in q for q in off["queue-list"]), f"{off}")
    r.require(not any("latency" in key and 'export="off"' in key for key in scrape(rig.dir / "metrics")), "off has a metric")
    blocks = {b["device"]: b["stats"] for b in json.loads(daemon.cli("qmp", "query-blockstats").stdout)}
    r.require(blocks["off"]["rd_operations"] == 4000 and "rd_latency_histogram" not in blocks["off"], f"{blocks['off']}")
    per_request = blocks["sampled"]["rd_total_time_ns"] / 4000
    r.require(abs(per_request - sampled["service-times"]["read"]["total-ns"] / count) < 1, f"{blocks['sampled']} and {sampled}")


def test_a_reset_starts_at_zero_and_counters_go_on(rig, daemon):
    key = 'vshunt_export_latency_seconds_count{export="on",operation="read"}'

    def load(count):
        child = bench(rig, "on", "--rw", "randread", "--queues", "2", "--ios", count)
        r.require(child.wait() == 0, child.tail())

    def blockstats():
        (stats,) = [b["stats"] for b in json.loads(daemon.cli("qmp", "query-blockstats").stdout) if b["device"] == "on"]
        return stats

    load(500)
    metric, sums, operations = int(scrape(rig.dir / "metrics")[key]), blockstats()["rd_total_time_ns"], blockstats()["rd_operations"]
    others = of(daemon, "sampled").get("service-times")
    daemon.cli("latency", "on", "--reset")
    r.require("read" not in of(daemon, "on")["service-times"], f"{of(daemon, 'on')}")
    r.require("rd_latency_histogram" not in blockstats() and blockstats()["rd_total_time_ns"] == sums, f"{blockstats()}")
    r.require(daemon.cli("latency", "on").stdout == "no request was measured\n", daemon.cli("latency", "on").stdout)
    r.require(of(daemon, "sampled").get("service-times") == others, "another export was reset, too")

    load(300)
    ((shown),) = json.loads(daemon.cli("latency", "on", "--json").stdout)
    read = shown["service-times"]["read"]
    r.require(read["count"] == 300 == sum(n for _, n in read["bins"]), f"{shown}")
    r.require(0 < read["p50-ns"] <= read["p99-ns"] <= read["max-ns"], f"{read}")
    r.require(["on", "read", "300"] in [line.split()[:3] for line in daemon.cli("latency").stdout.splitlines()], "the table")
    stats = blockstats()
    r.require(sum(stats["rd_latency_histogram"]["bins"]) == 300 and stats["rd_total_time_ns"] > sums, f"{stats}")
    r.require(stats["rd_operations"] == operations + 300, f"{stats}")
    r.require(int(scrape(rig.dir / "metrics")[key]) == metric + 300, "the metric went back")

    r.message_of(daemon.cli("latency", "off", "--reset", check=False), "off", "not measured", "latency=on")
    r.message_of(daemon.cli("latency", "nobody", check=False), "there is no export nobody", "export list")
    daemon.cli("latency", "--reset")
    r.require(daemon.cli("latency").stdout == "no request was measured\n", "not all are reset")


def test_top_has_the_figures_of_the_interval(rig, daemon):
    load = bench(rig, "on", "--rw", "randread", "--iodepth", "1", "--runtime", r.FOREVER)
    before = of(daemon, "on")["queue-list"][0]["requests"]
    r.wait_for("the load runs", lambda: of(daemon, "on")["queue-list"][0]["requests"] > before)

    def figures():
        """Returns the service times of one interval of `top`. On a busy machine there may be no request in it."""
        view = json.loads(daemon.cli("top", "--once", "--json", "--interval", "500ms").stdout)
        loaded = {e["name"]: e["service-times"] for e in view["exports"]}
        r.require(loaded["off"] is None and loaded["sampled"] is None, f"{loaded}")
        return loaded["on"]

    on = r.wait_for("top shows service times", figures)
    r.require(0 < on["p50-ns"] <= on["p99-ns"], f"{on}")
    text = daemon.cli("top", "--once", "--interval", "500ms").stdout
    r.require("P99" in text, text)
    load.interrupt()


def test_it_is_of_disks_only(daemon):
    done = daemon.cli("export", "add", "type=vhost-user-net,name=n0,net=none,socket=/nowhere/s,latency=on", check=False)
    r.message_of(done, "latency", "vhost-user-blk", "leave it out")


@pytest.mark.root
def test_a_slow_disk_has_slow_requests(rig, guarded):
    """The image of one daemon is a file that another one serves, which is suspended with all requests in flight."""
    image, file = rig.image("slow.img", 64 * MIB), rig.dir / "slow.mnt"
    below = r.Daemon(
        rig, "--disk", f"name=d0,file={image}",
        "--export", f"type=fuse,name=f0,disk=d0,mountpoint={file},passthrough=off,latency=on", name="below",
    )
    above = r.Daemon(
        rig, "--disk", f"name=d0,file={file},readonly=on,locking=off",
        "--export", f"name=slow,disk=d0,socket={rig.dir}/slow.sock,latency=on", name="above",
    )
    begin = time.monotonic()
    below.child.suspend()
    load = bench(rig, "slow", "--rw", "randread", "--iodepth", "16", "--ios", 16)
    r.wait_for("all requests are in flight", lambda: of(above, "slow")["queue-list"][0]["in-flight"] == 16)
    taken = time.monotonic()
    time.sleep(0.5)
    held_ns = (time.monotonic() - taken) * 1e9
    below.child.resume()
    r.require(load.wait() == 0, load.tail())
    most_ns = (time.monotonic() - begin) * 1e9
    reads = of(above, "slow")["service-times"]["read"]
    r.require(reads["count"] == 16, f"{reads}")
    for key in ("p50-ns", "p99-ns", "max-ns"):
        r.require(held_ns <= reads[key] <= most_ns, f"requests waited for {held_ns:.0f} to {most_ns:.0f} ns: {reads}")
    of_file = of(below, "f0")
    r.require(of_file["service-times"]["read"]["count"] == sum(q["reads"] for q in of_file["queue-list"]) >= 1, f"{of_file}")
    counted = sum(kind["count"] for kind in of_file["service-times"].values() if isinstance(kind, dict))
    r.require(sum(q["requests"] for q in of_file["queue-list"]) == counted, f"{of_file}")
    for daemon in (above, below):
        r.require(daemon.child.stop() == 0, daemon.child.tail())
