"""Tests the commands of the README and the guide as users run them.

`make run`, after the build, succeeds and shows the expected state. The commands of the pages for
disks, backups and networks work as written.
"""

import json
import os
import re
import shlex

import pytest
import rig as r

README = "README.md"
THIN = "docs/guide/thin-disks.md"
NETWORKS = "docs/guide/networks.md"
OPERATIONS = "docs/guide/operations.md"
VMMS = "docs/guide/vmms.md"


def test_make_run(rig):
    r.binary("vshunt-bench")
    done = r.run([r.ROOT / "scripts/run"], timeout_s=300, check=False, env={**os.environ, "TMPDIR": str(rig.dir)})
    text = done.stdout + done.stderr
    r.require(done.returncode == 0, f"scripts/run ended with {done.returncode}: {text[-1500:]}")
    r.require(re.search(r"\bvm0:2\b.*\bvm0:3\b|\bsecond\b", text), f"status does not show the second worker: {text}")
    complaint = re.search(r"^.*(panicked|vshunt[a-z-]*: (?!serving )).*$", text, re.MULTILINE)
    r.require(not complaint, f"it complains: {complaint and complaint[0]}")
    left = list(rig.dir.glob("vshunt-run*"))
    r.require(not left, f"it left {left} behind")


def block(page, after):
    """The first commands that a page shows behind some words of it."""
    text = (r.ROOT / page).read_text(encoding="utf-8")
    r.require(after in text, f"{page} does not say {after!r}")
    return text.split(after, 1)[1].split("```\n", 2)[1]


def in_folder(rig, script):
    """Lines of a page, with the folder of the rig in place of /tmp."""
    return script.replace("/tmp/", str(rig.dir).replace(" ", "\\ ") + "/")


def shell(rig, script):
    """Runs lines of a page in the folder of the rig. Each line has to succeed."""
    script = in_folder(rig, script)
    path = f"{os.path.dirname(r.binary('vshunt'))}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "VSHUNT_CONTROL": str(rig.dir / "vshunt.sock")}
    done = r.run(["bash", "-euxo", "pipefail", "-c", script], check=False, cwd=rig.dir, env=env, timeout_s=300)
    r.require(done.returncode == 0, f"the commands end with {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def served(rig, page, after, before="exec "):
    """Runs the daemon that a page shows behind these words, in the background, and first the commands before it. `before` is put in
    front of its command line."""
    # Smaller, for what is written to it is copied, too.
    first, serve = block(page, after).replace("40G", "512M").split("vshunt serve", 1)
    shell(rig, first)
    command = f"{before}{shlex.quote(r.binary('vshunt'))} serve" + in_folder(rig, serve)
    child = r.Child(rig, f"page-{len(rig.children)}", ["bash", "-c", command], cwd=rig.dir)
    r.wait_for(f"the daemon of {page} serves", lambda: "serving" in child.output() or not child.running())
    r.require(child.running(), child.tail())
    return child


def test_readme_disk(rig):
    """README's commands for a disk in use, from serving it to the daemon's end."""
    child = served(rig, README, "## A disk for a virtual machine")
    shell(rig, block(README, "While the guest runs, in a third terminal:"))
    r.require(child.wait() == 0, child.tail())


def test_guide_thin_disk_and_its_backups(rig):
    """A thin disk and its backups, under the load that the guide shows."""
    r.tool("qemu-img", "qemu-utils")
    child = served(rig, THIN, "# Thin disks")
    load = block(OPERATIONS, "## Loading a socket without a guest").splitlines()[0].replace("vm0.sock", "vm1.sock")
    backups = block(THIN, "## Backups").splitlines()
    shell(rig, "\n".join([load.replace("10s", "1s").replace("randread", "randwrite"), backups[0], load.replace("10s", "1s"), *backups[1:]]))
    shell(rig, "vshunt quit")
    r.require(child.wait() == 0, child.tail())
    same = r.run(["qemu-img", "compare", rig.dir / "vm1.qcow2", rig.dir / "monday.qcow2"], check=False)
    r.require(same.returncode == 0, f"the backup differs: {same.stdout}{same.stderr}")


def test_guide_other_vmms(rig):
    """The disk of the page for other VMMs, with one queue as Firecracker has it, and with a new size."""
    child = served(rig, VMMS, "The examples use this disk:")
    resize = re.search(r"`(vshunt resize [^`]*)`, tell Firecracker", (r.ROOT / VMMS).read_text(encoding="utf-8"))
    r.require(resize, f"{VMMS} does not show vshunt resize")
    load = "vshunt-bench blk --socket /tmp/vm0.sock --rw randrw --bs 4k --queues 1 --size 16M --verify --quiet"
    shell(rig, "\n".join([load, resize[1], "vshunt attach vm0:0 0", load, "vshunt quit"]))
    r.require(child.wait() == 0, child.tail())
    r.require((rig.dir / "disk.img").stat().st_size == 2 << 30, "the disk has not the new size")


@pytest.mark.root
def test_guide_network_devices(rig):
    """A network device on a tap, and two on a switch, as the guide serves them, in a network namespace of their own."""
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
        raise r.Skipped("needs root and /dev/net/tun")
    unshare = f"{r.tool('unshare', 'util-linux')} --net "
    tap = served(rig, NETWORKS, "## A tap", before="exec " + unshare)
    # The bridge is the reader's, and so is the virtual machine: what is between them and the end is
    # not.
    commands = [line for line in block(NETWORKS, "(the bridge `br0` is yours):").splitlines() if line.startswith("vshunt")]
    r.require(commands and "attach nic0:" in commands[0], f"{commands}")
    shell(rig, "\n".join([*commands, "vshunt quit"]))
    r.require(tap.wait() == 0, tap.tail())
    switch = served(rig, NETWORKS, "## A switch", before="exec " + unshare)
    shell(rig, block(NETWORKS, "It joins the switch to the networks of the host") + "\nvshunt status | grep joined\nvshunt net list; vshunt quit")
    r.require(switch.wait() == 0, switch.tail())
    program = rig.dir / "vshunt-net"
    program.symlink_to(r.binary("vshunt"))
    line = re.search(r"`vshunt-net (--socket-path[^`]*)`", (r.ROOT / NETWORKS).read_text(encoding="utf-8"))
    r.require(line, f"{NETWORKS} does not show vshunt-net")
    arguments = in_folder(rig, line[1])
    child = r.Child(rig, "vshunt-net", ["bash", "-c", f"exec {unshare} {shlex.quote(str(program))} {arguments}"])
    r.wait_for("vshunt-net serves", lambda: "serving" in child.output() or not child.running())
    bench = r.run([r.binary("vshunt-bench"), "net", "--socket", f"{rig.dir}/nic0.sock", "--mode", "source", "--frames", "1000",
                   "--queues", "2", "--quiet", "--json"])
    r.require('"frames": 1000' in bench.stdout, bench.stdout)
    r.require(child.stop() == 0, child.tail())


def test_make_install(rig):
    """`make install` into a staging folder: the programs run from there, the pages are there."""
    stage = rig.dir / "stage"
    env = {**os.environ, "DESTDIR": str(stage), "PREFIX": "/usr"}
    r.run([r.ROOT / "scripts/install"], env=env)
    for place in (
        *("usr/bin/vshunt", "usr/bin/vshunt-bench", "usr/libexec/vshunt-blk", "usr/share/man/man1/vshunt.1"),
        *("usr/libexec/vshunt-net", "usr/share/man/man1/vshunt-net.1", "usr/share/qemu/vhost-user/50-vshunt-net.json"),
        *("usr/share/man/man1/vshunt-blk.1", "usr/share/bash-completion/completions/vshunt"),
        *("usr/lib/systemd/system/vshunt.service", "usr/lib/systemd/system/vshunt.socket", "usr/lib/systemd/system/vshunt@.service"),
        *("usr/share/qemu/vhost-user/50-vshunt-blk.json", "usr/share/doc/vshunt/examples/vshunt.toml"),
    ):
        r.require((stage / place).exists(), f"{place} was not installed")
    r.run([stage / "usr/bin/vshunt", "--version"])
    for program, kind in (("vshunt-blk", "block"), ("vshunt-net", "net")):
        capabilities = r.run([stage / "usr/libexec" / program, "--print-capabilities"]).stdout
        r.require(json.loads(capabilities)["type"] == kind, f"capabilities of {program}: {capabilities}")


def test_service_sandbox_as_systemd_rates_it(rig):
    """The service's own sandbox, as systemd rates it: 0 (safe) to 10; 2.0 or better."""
    analyze = r.tool("systemd-analyze", "systemd")
    done = r.run([analyze, "security", "--offline=true", "--no-pager", r.ROOT / "packaging/vshunt.service"], check=False)
    rated = re.search(r"exposure level for vshunt.service: ([0-9.]+)", done.stdout)
    if not rated:
        raise r.Skipped(f"systemd-analyze rates no units here (version 250 or newer does): {done.stderr.strip()[-200:]}")
    r.require(float(rated[1]) <= 2.0, f"the service is rated {rated[1]}")


def anchors(page):
    """The anchors that a page's headings have."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower())) for heading in headings}


def test_links_of_the_pages():
    """Each link of a page to a file of the project leads somewhere, and so does its anchor."""
    pages = [page for pattern in ("*.md", "*/*.md", "docs/**/*.md", "crates/*/*.md") for page in r.ROOT.glob(pattern)]
    r.require(len(pages) > 20, f"only {len(pages)} pages are found")
    broken = []
    for page in sorted(set(pages)):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in (target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target):
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(r.ROOT)}: {target}")
    r.require(not broken, f"links that lead nowhere: {broken}")
