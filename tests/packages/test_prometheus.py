"""The rules and the dashboard, with the tools of Prometheus and a Prometheus that scrapes a daemon."""

import json
import re
import socket
import urllib.parse
import urllib.request
from http import HTTPStatus

import pytest
import rig as r

FOLDER = r.ROOT / "packaging"
# Metrics of objects that the daemon of this test does not have: taps and mounts.
ABSENT = ("vshunt_net_mtu_bytes", "vshunt_net_from_guest", "vshunt_net_to_guest", "vshunt_export_open_files")


def test_rules_for_alerts():
    """Each alert fires in its case, and none does when all is well."""
    promtool = r.tool("promtool", "prometheus")
    r.run([promtool, "check", "rules", FOLDER / "prometheus/vshunt.rules.yml"])
    r.run([promtool, "test", "rules", FOLDER / "prometheus/vshunt.rules.test.yml"])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def prometheus(rig):
    """The address of a Prometheus that scrapes a daemon with a disk, a switch, two exports, a bitmap and a job, under load."""
    program = r.tool("prometheus", "prometheus")
    metrics, port = free_port(), free_port()
    image = rig.dir / "d0.qcow2"
    r.run([r.binary("vshunt"), "image", "create", "-q", "-f", "qcow2", image, "256M"])
    daemon = r.Daemon(
        rig,
        *("--disk", f"name=d0,file={image},format=qcow2", "--net", "type=switch,name=s0", "--metrics", str(metrics)),
        *("--export", f"type=vhost-user-blk,name=vm0,disk=d0,socket={rig.dir}/vm0.sock,queues=2,workers=per-queue,balance=auto"),
        *("--export", f"type=vhost-user-net,name=nic0,net=s0,socket={rig.dir}/nic0.sock"),
    )
    daemon.cli("bitmap", "add", "d0", "b0")
    daemon.cli("backup", "start", "d0", "--to", rig.dir / "backup.qcow2", "--speed", "64K")
    bench = [r.binary("vshunt-bench"), "blk", "--socket", rig.dir / "vm0.sock", "--rw", "randrw", "--queues", "2", "--runtime", r.FOREVER, "--quiet"]
    r.Child(rig, "load", bench)
    config = rig.dir / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{FOLDER}/prometheus/vshunt.rules.yml]\n"
        f"scrape_configs: [{{job_name: vshunt, static_configs: [{{targets: ['127.0.0.1:{metrics}']}}]}}]\n",
        encoding="utf-8",
    )
    listen = f"127.0.0.1:{port}"
    r.Child(rig, "prometheus", [program, f"--config.file={config}", f"--storage.tsdb.path={rig.dir}/tsdb", f"--web.listen-address={listen}"])

    def scraped():
        found = answer(listen, "vshunt_queue_requests_total")
        return found and all(len(v["values"]) > 3 for v in answer(listen, "vshunt_queue_requests_total[1m]"))

    r.wait_for("Prometheus has scraped the daemon", scraped, every_s=0.5)
    return listen


def answer(listen, query):
    """The series of a query; none while there is no server, or it starts."""
    url = f"http://{listen}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=r.WAIT_S) as reply:
            told = json.load(reply)
    except urllib.error.HTTPError as e:
        # Prometheus listens before it has read its storage.
        if e.code == HTTPStatus.SERVICE_UNAVAILABLE:
            return []
        raise r.Failed(f"{query}: {e.read().decode()}") from e
    except OSError:
        return []
    r.require(told["status"] == "success", f"{query}: {told}")
    return told["data"]["result"]


def test_no_panel_of_the_dashboard_is_empty(prometheus):
    """Each panel shows something, except those of objects that this daemon does not have."""
    board = json.loads((FOLDER / "grafana/vshunt.json").read_text(encoding="utf-8"))
    panels = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    r.require(len(panels) > 30, f"only {len(panels)} panels")
    wrong = []
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in (("$instance", ".*"), ("$export", ".*"), ("$__rate_interval", "1m")):
                query = query.replace(name, value)
            absent = re.search(r"vshunt_\w+", query)[0].startswith(ABSENT)
            found = answer(prometheus, query)
            if bool(found) == absent:
                wrong.append(f"{query} has {len(found)} series")
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                r.require(all(label in series["metric"] for series in found), f"{panel['title']}: no label {label} in {found[:1]}")
    r.require(not wrong, "; ".join(wrong))


def test_no_alert_without_a_reason(prometheus):
    firing = answer(prometheus, 'ALERTS{alertstate="firing"}')
    r.require(not firing, f"alerts fire: {firing}")
