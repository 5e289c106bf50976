"""Runs `vshunt image` and qemu-img on the same images, and makes random images. For tests/image."""

import json
import os
import re
from pathlib import Path

import rig as r

# No command on these small images takes this long; one that does hangs.
HANG_S = 60.0


class Both:
    """The two programs, in one folder."""

    def __init__(self, rig):
        self.rig = rig
        self.dir = rig.dir / "images"
        self.dir.mkdir()
        self.qemu_img = r.tool("qemu-img", "qemu-utils")
        self.qemu_io = r.tool("qemu-io", "qemu-utils")

    def ours(self, *arguments, check=True):
        """`vshunt image …`"""
        return r.run([r.binary("vshunt"), "image", *arguments], timeout_s=HANG_S, check=check, cwd=self.dir)

    def theirs(self, *arguments, check=True):
        """`qemu-img …`"""
        return r.run([self.qemu_img, *arguments], timeout_s=HANG_S, check=check, cwd=self.dir)

    def io(self, file, *commands, check=True):
        """`qemu-io -c … FILE`"""
        argv = [self.qemu_io, "-f", "qcow2", *(x for c in commands for x in ("-c", c)), file]
        done = r.run(argv, timeout_s=HANG_S, check=False, cwd=self.dir)
        failed = done.returncode != 0 or "failed" in done.stdout
        r.require(not check or not failed, f"{file}: {commands}: {done.stdout}{done.stderr}")
        return done

    def wait_for_lock(self, file):
        """Waits until a process has locked a file. It is not opened here: the process could find that lock, and end."""
        inode = f":{os.stat(self.dir / file).st_ino} "
        r.wait_for(f"{file} is locked", lambda: inode in Path("/proc/locks").read_text(encoding="ascii"))

    def same_check(self, file, of=""):
        """Both check the image and count the same; their exit code."""
        results = []
        for run in (self.ours, self.theirs):
            done = run("check", "--output=json", file, check=False)
            r.require(done.stdout.strip(), f"{of}: no result: {done.stderr}")
            results.append((done.returncode, json.loads(done.stdout)))
        (code, mine), (their_code, their) = results
        r.require((code, mine) == (their_code, their), f"{of}: {code} {mine} is not {their_code} {their}")
        return code

    def same_info(self, file, of=""):
        """Both describe the image alike."""
        mine, their = (json.loads(run("info", "--output=json", file).stdout) for run in (self.ours, self.theirs))
        same_children(mine, their)
        r.require(mine == their, f"{of}: {mine} is not {their}")
        mine, their = (run("info", file).stdout.splitlines() for run in (self.ours, self.theirs))
        # Their columns of snapshots changed over the years.
        ignored = ("Child node", "    filename", "    protocol", "    file length", "    disk size", "ID  ")
        clock = re.compile(r"\b0*(\d\d:\d\d:\d\d\.\d)")
        mine, their = ([clock.sub(r"\1", x) for x in lines if not x.startswith(ignored)] for lines in (mine, their))
        # A snapshot without a count of instructions has no text there, or `--`.
        mine, their = ([[w for w in x.split() if w != "--"] for x in lines] for lines in (mine, their))
        r.require(mine == their, f"{of}: {mine} is not {their}")

    def clean(self, file, of=""):
        """Both find nothing wrong."""
        for run in (self.ours, self.theirs):
            done = run("check", file, check=False)
            r.require(done.returncode == 0, f"{of}: {done.args[0]} check ended with {done.returncode}: {done.stdout}{done.stderr[:600]}")


def same_children(mine, their):
    """Removes the descriptions of the files below from both. QEMU has them since version 8.0."""
    my_children, their_children = (of.pop("children", None) for of in (mine, their))
    r.require(my_children, f"no file below: {mine}")
    r.require(their_children in (None, my_children), f"{my_children} is not {their_children}")


def options_of(rand):
    """Options of a new image that go together, and its size."""
    o = {"cluster_size": 1 << rand.choice([9, 10, 12, 14, 16, 16, 18, 21])}
    size = rand.choice([1 << 20, 3 << 20, (5 << 20) + 512, 16 << 20])
    if rand.random() < 0.15:
        o["compat"] = "0.10"
        return o, size
    o["refcount_bits"] = 1 << rand.randrange(7)
    if o["cluster_size"] >= 1 << 14 and rand.random() < 0.4:
        o["extended_l2"] = "on"
    if rand.random() < 0.3:
        o["lazy_refcounts"] = "on"
    if rand.random() < 0.4:
        o["compression_type"] = "zstd"
    if rand.random() < 0.25:
        o["data_file"] = "DATA"
        if rand.random() < 0.5:
            o["data_file_raw"] = "on"
    if rand.random() < 0.3:
        o["preallocation"] = rand.choice(["metadata", "falloc", "full"])
    return o, size


def text_of(options, name):
    return ",".join(f"{k}={v}" for k, v in options.items()).replace("DATA", f"{name}.data")


def commands_of(rand, options, size, number, new=True):
    """qemu-io commands that fill it here and there, once it is new with compressed clusters first.

    QEMU fails to write those over what is there, and then leaves wrong counts behind.
    """
    commands = []
    cluster = options["cluster_size"]
    if new and not {"data_file", "preallocation"} & options.keys():
        for at in rand.sample(range(max(1, size // cluster)), min(4, size // cluster)):
            commands.append(f"write -c -P {rand.randrange(1, 255)} {at * cluster} {cluster}")
    for _ in range(number):
        offset = rand.randrange(size // 512) * 512
        length = min(size - offset, 512 * rand.choice([1, 8, 127, 128, 513]))
        kind = rand.choice(["write", "write", "write", "zero", "discard"])
        if kind == "zero":
            commands.append(f"write -z {rand.choice(['', '-u '])}{offset} {length}")
        elif kind == "discard":
            commands.append(f"discard {offset} {length}")
        else:
            commands.append(f"write -P {rand.randrange(1, 255)} {offset} {length}")
    return commands


def with_base(both, rand, arguments, options):
    """Arguments for an image below, sometimes."""
    if "data_file_raw" in options or rand.random() < 0.6:
        return arguments
    if options.get("preallocation") and options.get("extended_l2") != "on":
        return arguments
    both.theirs("create", "-q", "-f", "qcow2", "base.qcow2", "4M")
    both.io("base.qcow2", "write -P 77 0 1M")
    return [*arguments, "-b", "base.qcow2", "-F", "qcow2"]
