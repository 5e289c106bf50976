"""Tests `vshunt image rebase`, `amend` and `dd` beside qemu-img.

A guest has to read the same before and after a rebase, and after a kill at any moment.
"""

import json
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import rig as r
from images import commands_of, options_of, text_of
from seeds import SEED

MIB = 1 << 20
# Random overlays.
OVERLAYS = 10
# Kills of a rebase, at moments drawn at random.
KILLS = 8


class TestRebase:
    """Tests of changes of what an image stands on, and of its options."""

    @pytest.fixture(autouse=True)
    def _given(self, rig, both):
        self.rig, self.both = rig, both

    def contents(self, name):
        """The bytes that a guest reads."""
        self.both.theirs("convert", "-f", "qcow2", "-O", "raw", name, "contents.raw")
        return (self.both.dir / "contents.raw").read_bytes()

    def info(self, name):
        return json.loads(self.both.theirs("info", "--output=json", name).stdout)

    def raw(self, rand, name, size):
        with open(self.both.dir / name, "wb") as f:
            f.truncate(size)
            for _ in range(12):
                f.seek(rand.randrange(size // 512) * 512)
                f.write(rand.choice((rand.randbytes(70000), b"same" * 8192)))
            f.truncate(size)
        return name

    def overlay(self, rand, name, below, form):
        options, size = options_of(rand)
        for key in ("data_file", "data_file_raw", "preallocation"):
            options.pop(key, None)
        self.both.theirs("create", "-q", "-f", "qcow2", "-o", text_of(options, name), "-b", below, "-F", form, name, size)
        self.both.io(name, *commands_of(rand, options, size, 6, new=False))
        return f"{name} of seed {SEED}: {options} {size}"

    def test_a_guest_reads_the_same_after_a_safe_rebase(self, rand):
        both = self.both
        for n in range(OVERLAYS):
            self.raw(rand, "old.raw", rand.choice((MIB, 4 * MIB, 20 * MIB)))
            self.raw(rand, "plain.raw", rand.choice((MIB, 3 * MIB, 20 * MIB)))
            both.theirs("convert", "-O", "qcow2", "plain.raw", "new.qcow2")
            of = self.overlay(rand, f"over{n}", "old.raw", "raw")
            before = self.contents(f"over{n}")
            for backing, form in (("new.qcow2", "qcow2"), ("old.raw", "raw"), ("", None), ("plain.raw", "raw")):
                both.ours("rebase", "-q", "-b", backing, *(["-F", form] if form else []), f"over{n}")
                r.require(self.contents(f"over{n}") == before, f"{of}: on {backing!r} the disk is another")
                both.clean(f"over{n}", of)
                found = self.info(f"over{n}")
                r.require(found.get("backing-filename", "") == backing, f"{of}: {found}")
                r.require(found.get("backing-filename-format") == form, f"{of}: {found}")

    def test_only_what_differs_is_copied(self, rand):
        both = self.both
        (both.dir / "one.raw").write_bytes(rand.randbytes(8 * MIB))
        data = bytearray((both.dir / "one.raw").read_bytes())
        data[3 * MIB] ^= 1
        (both.dir / "two.raw").write_bytes(data)
        both.theirs("create", "-q", "-f", "qcow2", "-b", "one.raw", "-F", "raw", "thin")
        done = both.ours("rebase", "-p", "-b", "two.raw", "-F", "raw", "thin")
        r.require("rebasing: 100.0 %, 8 MiB of 8 MiB" in done.stderr, done.stderr)
        r.require(not done.stdout, done.stdout)
        parts = json.loads(both.ours("map", "--output=json", "thin").stdout)
        own = [(p["start"], p["length"]) for p in parts if p["depth"] == 0]
        r.require(own == [(3 * MIB, 65536)], own)

    def test_unsafe_changes_the_name_only(self, rand):
        both = self.both
        self.raw(rand, "base.raw", 4 * MIB)
        both.theirs("create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "named")
        size = os.stat(both.dir / "named").st_size
        both.ours("rebase", "-u", "-b", "not/yet/here.qcow2", "-F", "qcow2", "named")
        found = json.loads(both.ours("info", "--output=json", "named").stdout)
        r.require(found["backing-filename"] == "not/yet/here.qcow2", found)
        r.require(os.stat(both.dir / "named").st_size == size, "more than the header was written")
        both.ours("rebase", "-u", "-b", "base.raw", "-F", "raw", "named")
        both.same_info("named")

    def test_rebase_refuses_by_name(self, rand):
        both = self.both
        self.raw(rand, "low.raw", MIB)
        both.theirs("create", "-q", "-f", "qcow2", "-b", "low.raw", "-F", "raw", "mid")
        both.theirs("create", "-q", "-f", "qcow2", "-b", "mid", "-F", "qcow2", "high")
        (both.dir / "junk").write_bytes(b"QFI\xfb\0\0\0\x03" + b"\xff" * 504)
        before = (both.dir / "mid").read_bytes()
        for arguments, words in (
            (["-b", "high", "-F", "qcow2", "mid"], ["high", "stands on", "mid"]),
            (["-b", "mid", "-F", "qcow2", "mid"], ["mid", "below itself"]),
            (["-b", "low.raw", "mid"], ["-F raw"]),
            (["-b", "missing", "-F", "raw", "mid"], ["missing"]),
            (["-b", "low.raw", "-F", "vmdk", "mid"], ["vmdk", "-u"]),
            (["-b", "junk", "-F", "qcow2", "mid"], ["junk"]),
            (["-b", "low.raw", "-F", "raw", "low.raw"], ["low.raw", "backing files"]),
            (["-b", "low.raw", "-F", "raw", "junk"], ["junk"]),
            (["-u", "-b", "x" * 1024, "-F", "raw", "mid"], ["1023"]),
            (["mid"], ["--backing"]),
        ):
            r.message_of(both.ours("rebase", *arguments, check=False), *words)
            r.require((both.dir / "mid").read_bytes() == before, f"{arguments} changed the image")

    def test_a_killed_rebase_leaves_an_image_that_reads_the_same(self, rand):
        both = self.both
        (both.dir / "first.raw").write_bytes(rand.randbytes(96 * MIB))
        (both.dir / "second.raw").write_bytes(rand.randbytes(96 * MIB))
        both.theirs("create", "-q", "-f", "qcow2", "-b", "first.raw", "-F", "raw", "fresh")
        want = (both.dir / "first.raw").read_bytes()
        image, ended = (both.dir / "fresh").read_bytes(), 0
        for n in range(KILLS):
            (both.dir / "killed").write_bytes(image)
            argv = [r.binary("vshunt"), "image", "rebase", "-q", "-b", "second.raw", "-F", "raw", both.dir / "killed"]
            child = r.Child(self.rig, "rebase", argv)
            time.sleep(rand.random() * 0.6)
            ended += child.process.poll() is not None
            child.kill()
            done = both.ours("check", "-r", "all", "killed", check=False)
            r.require(done.returncode == 0, f"kill {n}: {done}")
            both.ours("convert", "killed", "killed.raw")
            r.require((both.dir / "killed.raw").read_bytes() == want, f"kill {n}: the disk is another")
            below = self.info("killed")["backing-filename"]
            r.require(below in ("first.raw", "second.raw"), below)
        r.require(ended < KILLS, "no rebase was killed")

    def test_images_in_use_are_refused(self):
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "busy", "4M")
        argv = [both.qemu_io, "-f", "qcow2", "-c", "read 0 64k", "-c", "sleep 600000", both.dir / "busy"]
        child = r.Child(self.rig, "busy", argv)
        both.wait_for_lock("busy")
        commands = (["rebase", "-u", "-b", "", "busy"], ["amend", "-o", "lazy_refcounts=on", "busy"], ["dd", "if=busy", "of=x"])
        # Each waits for the lock for some seconds.
        with ThreadPoolExecutor(len(commands)) as side_by_side:
            refused = list(side_by_side.map(lambda command: both.ours(*command, check=False), commands))
        for done in refused:
            r.message_of(done, "in use", "busy")
        r.require(not (both.dir / "x").exists(), "a file is left behind")
        both.ours("dd", "-U", "if=busy", "of=x")
        child.kill()

    def test_amend(self, rand):
        both = self.both
        self.raw(rand, "below.raw", MIB)
        both.ours("create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", "below.raw", "-F", "raw", "a", "2M")
        both.io("a", "write -P 3 100k 300k")
        before = self.contents("a")
        for options in ("compat=1.1", "lazy_refcounts=on", "lazy_refcounts=off", "compat=v2", "compat=v3,lazy_refcounts=on"):
            both.ours("amend", "-o", options, "a")
            both.same_info("a", options)
            both.clean("a", options)
            r.require(self.contents("a") == before, f"{options}: the disk is another")
        both.ours("amend", "-o", "size=4M", "a")
        r.require(self.contents("a") == before + bytes(2 * MIB), "it grew by something")
        both.ours("amend", "-o", "backing_file=", "a")
        r.require("backing-filename" not in self.info("a"), "still there")
        both.ours("amend", "-o", "backing_file=below.raw", "-o", "backing_fmt=raw", "a")
        r.require(self.contents("a") == before + bytes(2 * MIB), "not as before")
        text = both.ours("amend", "-o", "help").stdout
        r.require("lazy_refcounts" in text and "cluster_size" not in text, text)

    def test_amend_refuses_by_name(self, rand):
        both = self.both
        both.ours("create", "-q", "-f", "qcow2", "fixed", "2M")
        both.io("fixed", "write -z 0 64k")
        self.raw(rand, "fixed.raw", MIB)
        before = (both.dir / "fixed").read_bytes()
        (both.dir / "bad").write_bytes(before[:40] + b"\xff" * 60 + before[100:])
        torn = bytearray(before)
        l1_at = struct.unpack_from(">Q", before, 40)[0]
        struct.pack_into(">Q", torn, l1_at, 1 << 63 | 1 << 50)
        (both.dir / "torn").write_bytes(torn)
        for arguments, words in (
            (["-o", "cluster_size=4k", "fixed"], ["cluster_size", "convert"]),
            (["-o", "preallocation=full", "fixed"], ["preallocation"]),
            (["-o", "compat=0.10", "fixed"], ["zeroes", "copy"]),
            (["-o", "compat=2", "fixed"], ["compat=2"]),
            (["-o", "size=1M", "fixed"], ["--shrink"]),
            (["-o", "data_file=x", "fixed"], ["no data file"]),
            (["-o", "backing_fmt=raw", "fixed"], ["backing_file"]),
            (["-o", "backing_file=x", "fixed"], ["backing_fmt"]),
            (["-o", "colour=red", "fixed"], ["colour"]),
            (["-o", "compat=v3", "fixed.raw"], ["fixed.raw", "raw"]),
            (["-o", "compat=v3", "bad"], ["bad"]),
            (["-o", "lazy_refcounts=on", "torn"], ["torn", "check -r all"]),
            (["-o", "compat=v3"], ["image"]),
        ):
            r.message_of(both.ours("amend", *arguments, check=False), *words)
            r.require((both.dir / "fixed").read_bytes() == before, f"{arguments} changed the image")

    def test_dd(self, rand):
        both = self.both
        data = rand.randbytes(3 * MIB) + bytes(2 * MIB) + rand.randbytes(MIB + 512)
        (both.dir / "in.raw").write_bytes(data)
        both.theirs("convert", "-O", "qcow2", "in.raw", "in.qcow2")
        for n, (more, start, end) in enumerate((
            ([], 0, None), (["bs=1M"], 0, None), (["bs=1M", "count=2"], 0, 2 * MIB), (["bs=1M", "skip=2"], 2 * MIB, None),
            (["bs=1000", "count=7"], 0, 7000), (["bs=1M", "skip=1", "count=3"], MIB, 4 * MIB), (["bs=64k", "count=9999"], 0, None),
            (["bs=1", "skip=1000"], 1000, None), (["bs=3M", "skip=1", "count=0"], 0, 0), (["bs=1G", "skip=5"], 0, 0),
        )):  # fmt: skip
            want = data[start:end]
            want += bytes(-len(want) % 512)
            for source in ("in.raw", "in.qcow2"):
                for form in ("raw", "qcow2"):
                    out = f"out{n}.{form}"
                    done = both.ours("dd", "-O", form, *more, f"if={source}", f"of={out}")
                    r.require(done.stdout.startswith("Copied "), done)
                    got = self.contents(out) if form == "qcow2" and want else (both.dir / out).read_bytes() if form == "raw" else b""
                    r.require(got == want, f"{more} from {source} to {form}: {len(got)} bytes, not {len(want)}, or others")
            if not {"skip=1", "skip=5", "bs=1"} & set(more):
                # qemu-img counts from the start of the input, not from what was skipped; and it is
                # slow with small blocks.
                both.theirs("dd", *more, "if=in.qcow2", "of=their.raw")
                r.require((both.dir / "their.raw").read_bytes() == want, f"{more}: qemu-img copies something else")
        r.require(not both.ours("-q", "dd", "if=in.raw", "of=quiet").stdout, "not quiet")

    def test_dd_refuses_by_name(self, rand):
        both = self.both
        self.raw(rand, "src.raw", MIB)
        both.theirs("create", "-q", "-f", "qcow2", "-b", "src.raw", "-F", "raw", "src")
        os.symlink("src.raw", both.dir / "same.raw")
        (both.dir / "broken").write_bytes(b"QFI\xfb\0\0\0\x03" + b"\xff" * 504)
        before = (both.dir / "src.raw").read_bytes()
        for arguments, words in (
            (["if=src.raw"], ["of=FILE"]),
            (["of=o"], ["if=FILE"]),
            (["if=src.raw", "of=o", "bs=0"], ["bs=0"]),
            (["if=src.raw", "of=o", "bs=x"], ["bs"]),
            (["if=src.raw", "of=o", "seek=1"], ["seek=1", "skip"]),
            (["if=src.raw", "of=same.raw"], ["src.raw", "itself"]),
            (["if=src", "of=src.raw"], ["src", "consists"]),
            (["if=missing", "of=o"], ["missing"]),
            (["if=broken", "of=o"], ["broken"]),
            (["if=src.raw", "of=no/where"], ["no/where"]),
        ):
            r.message_of(both.ours("dd", *arguments, check=False), *words)
            r.require(not (both.dir / "o").exists(), f"{arguments} left a file behind")
            r.require((both.dir / "src.raw").read_bytes() == before, f"{arguments} changed the source")
