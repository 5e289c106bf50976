"""Tests `vshunt image` commands that change images: size, snapshots, bitmaps.

The guest's view is compared byte for byte. Both programs change copies of one image, or change
one image in turn. `qemu-img convert` gives the guest's view.
"""

import json

import pytest
import rig as r
from images import commands_of, options_of, text_of
from seeds import SEED

# Programs of random changes, each of some steps on one image.
PROGRAMS = 8
STEPS = 10


class TestChanges:
    """Tests of commands that change an image."""

    @pytest.fixture(autouse=True)
    def _given(self, rig, both):
        self.rig, self.both = rig, both

    def contents(self, name, snapshot=None):
        """The bytes that a guest reads."""
        out = self.both.dir / "contents.raw"
        more = ["-l", f"snapshot.name={snapshot}"] if snapshot else []
        self.both.theirs("convert", "-f", "qcow2", "-O", "raw", *more, name, out)
        return out.read_bytes()

    def image(self, rand, name):
        """A new image without a data file, its options and its size."""
        while True:
            options, size = options_of(rand)
            # Snapshots need counts of more than one bit; large clusters are slow to compare.
            if "data_file" not in options and options.get("refcount_bits", 16) > 4 and options["cluster_size"] <= 1 << 16:
                break
        self.both.ours("create", "-q", "-f", "qcow2", "-o", text_of(options, name), name, size)
        return options, size

    def test_random_programs_of_both(self, rand):
        """Writes, snapshots, applications, deletions and resizes, each by one of the two at random."""
        both = self.both
        for n in range(PROGRAMS):
            name, was, log = f"program{n}", {}, []
            options, size = self.image(rand, name)
            v2 = options.get("compat") == "0.10"
            for step in range(STEPS):
                run = rand.choice([both.ours, both.theirs])
                who = "our" if run == both.ours else "their"
                kind = rand.choice(["write", "write", "snapshot", "apply", "delete", "resize"])
                of = f"program {n} of seed {SEED}, {options}: {log} then {who} {kind}"
                before = self.contents(name)
                if kind == "write":
                    both.io(name, *commands_of(rand, options, len(before), 4, new=False))
                elif kind == "snapshot":
                    run("snapshot", "-c", f"s{step}", name)
                    was[f"s{step}"] = before
                    r.require(self.contents(name) == before, f"{of}: the disk is another")
                elif kind == "apply" and was:
                    # QEMU gives up on snapshots of another size in old images.
                    which = rand.choice(list(was))
                    run("snapshot", "-a", which, name)
                    r.require(self.contents(name) == was[which], f"{of} {which}: not what it was")
                elif kind == "delete" and was:
                    which = rand.choice(list(was))
                    run("snapshot", "-d", which, name)
                    del was[which]
                    r.require(self.contents(name) == before, f"{of} {which}: the disk is another")
                elif kind == "resize" and not (v2 and was):
                    # A multiple of all cluster sizes: QEMU keeps what is behind the end of a
                    # cluster.
                    size = rand.randrange(1, 20) << 20
                    run("resize", "-q", "--shrink", name, size)
                    now = self.contents(name)
                    n_same = min(len(before), size)
                    r.require(now[:n_same] == before[:n_same], f"{of} to {size}: the disk is another")
                    r.require(not any(now[n_same:]), f"{of} to {size}: what it grew by is not zero")
                log.append(f"{who} {kind}")
                r.require(both.same_check(name, of) == 0, f"{of}: not clean")
            for which, contents in was.items():
                now = self.contents(name, which)
                # QEMU reads it with the size that the disk has now.
                same = min(len(now), len(contents))
                r.require(now[:same] == contents[:same], f"program {n}: snapshot {which} is another: {log}")
            both.same_info(name, f"program {n}: {log}")

    def test_a_snapshot_of_one_is_the_others(self, rand):
        both = self.both
        self.image(rand, "snap")
        both.io("snap", "write -P 1 0 1M")
        both.ours("snapshot", "-c", "ours", "snap")
        both.io("snap", "write -P 2 0 1M")
        both.theirs("snapshot", "-c", "theirs", "snap")
        both.io("snap", "write -P 3 0 1M")
        mine, their = (run("snapshot", "-l", "snap").stdout.splitlines()[2:] for run in (both.ours, both.theirs))
        r.require([x.split()[:6] for x in mine] == [x.split()[:6] for x in their], f"{mine} is not {their}")
        r.require(len(mine) == 2, f"{mine}")
        both.theirs("snapshot", "-a", "ours", "snap")
        r.require(self.contents("snap")[: 1 << 20] == b"\1" * (1 << 20), "our snapshot is another in QEMU")
        both.ours("snapshot", "-a", "2", "snap")
        r.require(self.contents("snap")[: 1 << 20] == b"\2" * (1 << 20), "QEMU's snapshot is another here")
        both.ours("snapshot", "-d", "theirs", "snap")
        both.theirs("snapshot", "-d", "ours", "snap")
        r.require(both.same_check("snap") == 0, "not clean")
        r.require(both.ours("snapshot", "snap").stdout == "", "snapshots are left")

    def bits(self, name, bitmap):
        """Ranges that a bitmap says were written, as QEMU reads it."""
        opened = f"json:{{'driver':'qcow2','file':{{'driver':'file','filename':'{self.both.dir / name}'}}}}"
        nbd = r.tool("qemu-nbd", "qemu-utils")
        socket = self.both.dir / "nbd.sock"
        child = r.Child(self.rig, "qemu-nbd", [nbd, "-r", "-k", socket, "-B", bitmap, opened], cwd=self.both.dir)
        r.wait_for("qemu-nbd", lambda: socket.exists() or not child.running())
        r.require(child.running(), f"qemu-nbd: {child.tail()}")
        options = f"driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}"
        done = self.both.theirs("map", "--output=json", "--image-opts", options)
        child.stop()
        # With that option data=false says dirty (docs/tools/qemu-nbd, x-dirty-bitmap).
        return [(x["start"], x["length"]) for x in json.loads(done.stdout) if not x["data"]]

    def test_bitmaps_of_one_are_the_others(self):
        both = self.both
        both.ours("create", "-q", "-f", "qcow2", "map", "64M")
        both.ours("bitmap", "--add", "map", "ours")
        both.theirs("bitmap", "--add", "-g", "4k", "map", "theirs")
        both.ours("bitmap", "--add", "--disable", "-g", "512", "map", "off")
        both.same_info("map")
        both.io("map", "write 1M 64k", "write 60M 1k")
        r.require(both.same_check("map") == 0, "not clean")
        want = [(1 << 20, 65536), (60 << 20, 65536)]
        r.require(self.bits("map", "ours") == want, f"{self.bits('map', 'ours')} is not {want}")
        both.ours("bitmap", "--merge", "theirs", "map", "off")
        want = [(1 << 20, 65536), (60 << 20, 4096)]
        r.require(self.bits("map", "off") == want, f"{self.bits('map', 'off')} is not {want}")
        both.ours("create", "-q", "-f", "qcow2", "other", "64M")
        both.ours("bitmap", "--add", "other", "copy")
        both.ours("bitmap", "--merge", "off", "-b", "map", "other", "copy")
        both.theirs("bitmap", "--merge", "ours", "-b", "map", "-F", "qcow2", "other", "copy")
        r.require(self.bits("other", "copy") == self.bits("map", "ours"), "merged bits are others")
        both.ours("bitmap", "--clear", "map", "ours")
        r.require(self.bits("map", "ours") == [], "bits are left")
        both.ours("bitmap", "--disable", "map", "ours")
        both.theirs("bitmap", "--enable", "map", "off")
        both.same_info("map")
        both.ours("resize", "-q", "map", "128M")
        both.theirs("resize", "-q", "map", "200M")
        both.ours("resize", "-q", "--shrink", "map", "61M")
        r.require(both.same_check("map") == 0, "not clean")
        r.require(self.bits("map", "off") == want, f"{self.bits('map', 'off')} is not {want} after resizing")
        for name in ("ours", "theirs", "off"):
            both.ours("bitmap", "--remove", "map", name)
        both.same_info("map")
        r.require(both.same_check("map") == 0, "not clean")

    def test_a_disk_grows_and_shrinks(self):
        both = self.both
        both.ours("create", "-q", "raw", "1M")
        both.ours("resize", "raw", "+1M")
        both.ours("resize", "--preallocation=falloc", "raw", "+1M")
        both.ours("resize", "--shrink", "raw", "-512K")
        r.require((both.dir / "raw").stat().st_size == 5 << 19, "not 2.5M")
        # An odd end, with data behind it once the disk is shorter.
        both.ours("create", "-q", "-f", "qcow2", "odd", "1M")
        both.io("odd", "write -P 9 0 1M")
        both.ours("resize", "--shrink", "odd", "100000")
        both.theirs("resize", "-q", "odd", "1M")
        now = self.contents("odd")
        r.require(now == (b"\x09" * 100352).ljust(1 << 20, b"\0"), "what was cut came back")
        for mode in ("metadata", "falloc", "full"):
            both.ours("resize", f"--preallocation={mode}", "odd", "+3M")
            r.require(both.same_check("odd") == 0, f"{mode}: not clean")
        r.require(self.contents("odd") == now.ljust(10 << 20, b"\0"), "what it grew by is not zero")
        # A larger image below must not show.
        both.ours("create", "-q", "-f", "qcow2", "large", "8M")
        both.io("large", "write -P 7 0 8M")
        both.ours("create", "-q", "-f", "qcow2", "-b", "large", "-F", "qcow2", "over", "2M")
        both.ours("resize", "over", "10M")
        r.require(self.contents("over") == (b"\7" * (2 << 20)).ljust(10 << 20, b"\0"), "the image below shows")
        self.over_another()
        # A data file of its own follows.
        both.ours("create", "-q", "-f", "qcow2", "-o", "data_file=ext.data,data_file_raw=on", "ext", "1M")
        both.io("ext", "write -P 5 0 1M")
        both.ours("resize", "ext", "3M")
        both.io("ext", "write -P 6 2M 1M")
        both.ours("resize", "--shrink", "ext", "2560K")
        data = (both.dir / "ext.data").read_bytes()
        r.require(data == b"\5" * (1 << 20) + b"\0" * (1 << 20) + b"\6" * (1 << 19), "the data file is another")
        r.require(both.same_check("ext") == 0, "not clean")

    def over_another(self):
        """The disk, or the image below, ends within a cluster."""
        both = self.both
        for size in (100_352, 300_032):
            (both.dir / f"base{size}").write_bytes(b"\7" * size)
        for old, below in ((196_608, 100_352), (100_352, 100_352), (100_352, 300_032), (131_072, 300_032)):
            for mode, extended in (("off", "off"), ("off", "on"), ("metadata", "off"), ("falloc", "on"), ("full", "off")):
                options = f"extended_l2={extended}"
                both.ours("create", "-q", "-f", "qcow2", "-o", options, "-b", f"base{below}", "-F", "raw", "short", old)
                both.ours("bitmap", "--add", "short", "b")
                both.ours("resize", "-q", f"--preallocation={mode}", "short", "512000")
                of = f"{old} over {below}, {mode}, {options}"
                r.require(both.same_check("short") == 0, f"{of}: not clean")
                want = (b"\7" * min(old, below)).ljust(512_000, b"\0")
                r.require(self.contents("short") == want, f"{of}: it reads otherwise")
                if mode == "full":
                    r.require(self.bits("short", "b") == [], f"{of}: the bitmap is not what it was")

    def test_what_cannot_be_done_is_refused_by_name(self):
        both = self.both
        both.ours("create", "-q", "-f", "qcow2", "no", "1M")
        both.ours("create", "-q", "-f", "raw", "no.raw", "1M")
        both.ours("create", "-q", "-f", "qcow2", "-o", "data_file=no.data", "no.ext", "1M")
        before = (both.dir / "no").read_bytes()
        for arguments, words in (
            (["resize", "no", "1K"], ["no", "--shrink"]),
            (["resize", "no", "-2M"], ["no"]),
            (["resize", "no", "1.5X"], ["1.5X"]),
            (["resize", "--shrink", "--preallocation=full", "no", "1K"], ["preallocation"]),
            (["snapshot", "-a", "x", "no"], ["snapshot x"]),
            (["snapshot", "-d", "x", "no"], ["snapshot x"]),
            (["snapshot", "-c", "x", "-d", "y", "no"], ["cannot be used with"]),
            (["snapshot", "-c", "x", "no.raw"], ["no.raw", "raw"]),
            (["snapshot", "-c", "x", "no.ext"], ["data file"]),
            (["bitmap", "--remove", "no", "b"], ["bitmap b"]),
            (["bitmap", "--add", "-g", "1000", "no", "b"], ["1000"]),
            (["bitmap", "no", "b"], ["--add"]),
            (["bitmap", "--add", "no.raw", "b"], ["raw"]),
            (["resize", "missing", "1G"], ["missing"]),
        ):
            r.message_of(both.ours(*arguments, check=False), *words)
        r.require((both.dir / "no").read_bytes() == before, "the image was touched")

    def test_a_corrupt_image_is_not_changed(self):
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "sick", "4M")
        both.io("sick", "write 0 1M")
        data = bytearray((both.dir / "sick").read_bytes())
        data[0x20008:0x2000A] = b"\0\0"  # the count of an L2 table
        (both.dir / "sick").write_bytes(data)
        for arguments in (["resize", "sick", "8M"], ["snapshot", "-c", "x", "sick"], ["bitmap", "--add", "sick", "b"]):
            r.message_of(both.ours(*arguments, check=False), "sick", "corrupt", "check -r all")
        r.require((both.dir / "sick").read_bytes() == bytes(data), "the image was touched")
        both.ours("check", "-r", "all", "sick")
        both.ours("snapshot", "-c", "x", "sick")
        r.require(both.same_check("sick") == 0, "not clean")
        self.of_no_use()
        self.later_version()
        # One that was not closed is repaired first.
        both.ours("create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", "open", "4M")
        both.io("open", "write -P 5 0 1M", "abort", check=False)
        both.ours("snapshot", "-c", "x", "open")
        r.require(both.same_check("open") == 0, "not clean")

    def of_no_use(self):
        """Harmless values that QEMU refuses: a flag without a table, a table without entries."""
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "useless", "1M")
        both.io("useless", "write -P 3 0 64k")
        before = self.contents("useless")
        data = bytearray((both.dir / "useless").read_bytes())
        l1 = int.from_bytes(data[40:48], "big")
        data[l1 + 8 * 20 : l1 + 8 * 21] = (1 << 63).to_bytes(8, "big")
        data[64:72] = (0x201).to_bytes(8, "big")
        (both.dir / "useless").write_bytes(data)
        r.require(both.theirs("info", "useless", check=False).returncode != 0, "QEMU opens it: the test tests nothing")
        r.require(both.ours("check", "-q", "useless", check=False).returncode == 2, "nothing is found")
        both.ours("check", "-q", "-r", "all", "useless")
        r.require(both.same_check("useless") == 0, "not clean")
        data = (both.dir / "useless").read_bytes()
        r.require(data[l1 + 8 * 20 : l1 + 8 * 21] == bytes(8) == data[64:72], "it is still there")
        both.io("useless", "write -P 4 700k 1k")
        r.require(self.contents("useless")[: 64 << 10] == before[: 64 << 10], "the disk is another")
        r.require(both.same_check("useless") == 0, "not clean after a write")

    def later_version(self):
        """An image of an unknown version is not served as a raw disk."""
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "later", "1M")
        data = bytearray((both.dir / "later").read_bytes())
        for version in (1, 4, 7):
            data[7] = version
            (both.dir / "later").write_bytes(data)
            for arguments in (["info", "later"], ["check", "later"], ["resize", "later", "2M"], ["snapshot", "-l", "later"],
                              ["convert", "-O", "raw", "later", "later.raw"]):
                r.message_of(both.ours(*arguments, check=False), "later", f"version {version}", "raw")
        r.require((both.dir / "later").read_bytes() == bytes(data), "the image was touched")
        both.ours("convert", "-f", "raw", "-O", "raw", "later", "later.raw")
