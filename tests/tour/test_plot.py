"""`vshunt-bench workers --plot` and `vshunt-bench depth --plot`: pictures of the tables."""

import json
import xml.etree.ElementTree as ET

import rig as r

SVG = "{http://www.w3.org/2000/svg}"
# Time for slow machines: a measurement has 0.5 s of warm-up and 0.1 s for each job to attach.
SHORT = ("--formats", "null", "--runtime", "500ms", "--json")


def bench(*args, check=True):
    return r.run([r.binary("vshunt-bench"), *args], timeout_s=200, check=check)


def read(path):
    """The texts of a picture, and for each colour the numbers of points of its lines, the legend's sample first."""
    root = ET.parse(path).getroot()
    texts = [(node.text or "").strip() for node in root.iter(f"{SVG}text")]
    lines = {}
    for node in root.iter(f"{SVG}polyline"):
        lines.setdefault(node.get("stroke"), []).append(len(node.get("points").split()))
    background = next(root.iter(f"{SVG}rect"))
    r.require(background.get("fill") == "#FFFFFF" and background.get("width") == root.get("width"), "the background is not white")
    return texts, lines


def test_workers(rig):
    r.binary("vshunt")
    picture = rig.dir / "a & b <1>.svg"
    done = bench("workers", "--jobs", "1,2", *SHORT, "--plot", picture)
    table = json.loads(done.stdout)
    names = [row["workers"] for row in table["rows"]]
    texts, lines = read(picture)
    for text in [*names, "format=null", "jobs, each with a queue and a thread", "IOPS", "1", "2", "0"]:
        r.require(text in texts, f"no {text!r} in {texts}")
    # Each assignment has a line of two points. The first two names are in the seed, too.
    counts = [points[1:] for points in lines.values() if points[1:] and set(points) <= {2, 3}]
    r.require(sum(counts, []).count(2) >= 3, f"{lines}")
    shown = " ".join(texts)
    r.require("workers --jobs 1,2 --formats null --runtime 500ms" in shown, f"the command is not shown: {texts}")
    r.require("a & b <1>.svg'" in shown, f"the file's name is not shown as it is: {texts}")
    r.require(f"{table['machine']['cpus']} CPUs, Linux {table['machine']['kernel']}" in shown, f"the machine is not shown: {texts}")


def test_depth(rig):
    r.binary("vshunt")
    picture = rig.dir / "depth.svg"
    table = json.loads(bench("depth", "--depths", "1,8", "--queues", "1,2", *SHORT, "--reps", "2", "--plot", picture).stdout)
    rows = [(row["queues"], row["workers"], [figure["depth"] for figure in row["figures"]]) for row in table["rows"]]
    r.require(rows == [(1, "one worker", [1, 8]), (2, "one worker", [1, 8]), (2, "a worker a queue", [1, 8])], f"{rows}")
    r.require(all(figure["iops"] > 0 for row in table["rows"] for figure in row["figures"]), f"{table}")
    texts, _ = read(picture)
    for text in ["1 queue", "2 queues, one worker", "2 queues, a worker a queue", "8"]:
        r.require(text in texts, f"no {text!r} in {texts}")
    r.require("median of 2 times 0.5 s" in " ".join(texts), f"{texts}")


def test_a_file_that_cannot_be_written_is_refused_first(rig):
    for command in ("workers", "depth"):
        # There is no such program, which would be the first error of the measurement.
        for name, status, message in (("none/a.svg", 1, "name a file that can be written"), ("a.png", 2, "name a file that ends in .svg")):
            done = bench(command, "--vshunt", rig.dir / "missing", "--plot", rig.dir / name, check=False)
            r.require(done.returncode == status and message in done.stderr and "--plot" in done.stderr, f"{name}: {done}")
    # A measurement that fails leaves no file.
    done = bench("workers", "--vshunt", rig.dir / "missing", "--plot", rig.dir / "a.svg", check=False)
    r.require(done.returncode == 2 and not (rig.dir / "a.svg").exists(), f"{done}")
