"""Tests `vshunt image map`, `measure` and `compare` beside qemu-img.

The JSON of both programs has to be equal for the same image. Images are random, with chains of
backing files, or corrupt.
"""

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import rig as r
from images import commands_of, options_of, text_of
from seeds import SEED

MIB = 1 << 20
# Random images of each kind.
COMBINATIONS = 16
# The commands, with the arguments before the image.
EXAMINE = (["map"], ["map", "--output=json"], ["measure", "-O", "qcow2"], ["compare"])


def on(command, image):
    """The arguments that examine an image; compare gets it twice."""
    return [*command, image, image] if command == ["compare"] else [*command, image]


class TestExamine:
    """Tests of commands that change nothing."""

    @pytest.fixture(autouse=True)
    def _given(self, rig, both):
        self.rig, self.both = rig, both

    def image(self, rand, name, below=None):
        """A random image, filled here and there, on another one or none."""
        options, size = options_of(rand)
        if below:
            for key in ("data_file", "data_file_raw", "preallocation"):
                options.pop(key, None)
        on_it = ["-b", below[0], "-F", below[1]] if below else []
        self.both.theirs("create", "-q", "-f", "qcow2", "-o", text_of(options, name), *on_it, name, size)
        self.both.io(name, *commands_of(rand, options, size, 8, new=not below))
        return f"{name} of seed {SEED}: {options} {size} on {below}"

    def raw(self, rand, name, size):
        with open(self.both.dir / name, "wb") as f:
            f.truncate(size)
            for _ in range(4):
                f.seek(rand.randrange(size // 4096) * 4096)
                f.write(rand.randbytes(4096)[: size])
            f.truncate(size)
        return name

    def same_map(self, name, of, *more):
        """Both print the same map."""
        mine, their = (run("map", "--output=json", *more, name).stdout for run in (self.both.ours, self.both.theirs))
        mine, their = json.loads(mine), json.loads(their)
        if not any("compressed" in part for part in their):
            # A field of newer versions. Without it two parts may look like one.
            for part in mine:
                part.pop("compressed")
        r.require(mine == their, f"{of}: {more}: {mine} is not {their}")
        done = [run("map", *more, name, check=False) for run in (self.both.ours, self.both.theirs)]
        r.require(done[0].returncode == done[1].returncode, f"{of}: {done}")
        if done[0].returncode == 0:
            r.require(done[0].stdout == done[1].stdout, f"{of}: {done}")
        else:
            r.message_of(done[0], "compressed", "--output=json", name.split(".")[0][:2])

    def same_measure(self, of, *arguments):
        mine, their = (run("measure", "--output=json", *arguments).stdout for run in (self.both.ours, self.both.theirs))
        r.require(json.loads(mine) == json.loads(their), f"{of}: {arguments}: {mine} is not {their}")
        mine, their = (run("measure", *arguments).stdout for run in (self.both.ours, self.both.theirs))
        r.require(mine == their, f"{of}: {arguments}: {mine} is not {their}")

    def same_compare(self, of, *arguments):
        done = [run("compare", *arguments, check=False) for run in (self.both.ours, self.both.theirs)]
        (code, mine), (their_code, their) = ((d.returncode, d.stdout) for d in done)
        if "Strict mode: Offset" in their:
            # qemu-img compares the ends of the parts, too, so it may find a difference earlier.
            r.require("Offset" in mine or "offset" in mine, mine)
            mine = their
        r.require((code, mine) == (their_code, their), f"{of}: {arguments}: {code} {mine} is not {their_code} {their}")
        return code

    def test_maps_of_random_images(self, rand):
        both = self.both
        for n in range(COMBINATIONS):
            of = self.image(rand, f"map{n}")
            self.same_map(f"map{n}", of)
            start = rand.randrange(MIB)
            self.same_map(f"map{n}", of, f"--start-offset={start}", f"--max-length={rand.randrange(1, MIB)}")
            # qemu-img lists a part of 0 bytes there.
            r.require(both.ours("map", "--output=json", "-s", "900M", "-l", "1", f"map{n}").stdout == "[]\n", of)

    def test_maps_of_chains_and_raw_images(self, rand):
        for n in range(COMBINATIONS):
            low = (self.raw(rand, f"low{n}.raw", rand.choice((MIB, 3 * MIB, 2 * MIB + 512, 2 * MIB + 100))), "raw")
            self.same_map(low[0], low[0], "-f", "raw")
            of = self.image(rand, f"middle{n}", low)
            self.same_map(f"middle{n}", of)
            of += self.image(rand, f"top{n}", (f"middle{n}", "qcow2"))
            self.same_map(f"top{n}", of)
            self.same_measure(of, "-O", "qcow2", f"top{n}")
            self.same_compare(of, f"top{n}", f"middle{n}")
            self.same_compare(of, "-s", f"top{n}", f"top{n}")

    def test_measure(self, rand):
        both = self.both
        for n in range(COMBINATIONS):
            of = self.image(rand, f"measured{n}")
            options, size = options_of(rand)
            for key in ("data_file", "data_file_raw", "lazy_refcounts", "compression_type"):
                options.pop(key, None)
            text = text_of(options, "x")
            self.same_measure(of, "-O", "qcow2", "-o", text, f"measured{n}")
            self.same_measure(of, "-O", "raw", f"measured{n}")
            self.same_measure(of, "-O", "qcow2", "-o", text, "--size", str(size))
            self.same_measure(of, "--size", "1G")
        both.theirs("create", "-q", "-f", "qcow2", "marked", "64M")
        both.theirs("bitmap", "--add", "marked", "b0")
        both.theirs("bitmap", "--add", "-g", "512", "marked", "a-long-name")
        both.io("marked", "write -P 3 1M 1M")
        both.theirs("snapshot", "-c", "then", "marked")
        both.io("marked", "write -P 3 5M 1M")
        self.same_measure("bitmaps", "-O", "qcow2", "marked")
        self.same_measure("a snapshot", "-O", "qcow2", "-l", "then", "marked")
        r.message_of(both.ours("measure", "-O", "qcow2", "-l", "never", "marked", check=False), "marked", "snapshot never")
        self.same_measure("a backing file", "-O", "qcow2", "-o", "backing_file=x", "marked")
        for arguments, words in (
            ([], ["--size"]),
            (["--size", "1M", "marked"], ["--size"]),
            (["--size", "1M", "-l", "then"], ["-l", "image"]),
            (["-O", "raw", "-o", "compat=v3", "--size", "1M"], ["raw", "qcow2"]),
            (["-O", "qcow2", "-o", "cluster_size=3", "--size", "1M"], ["cluster_size"]),
            (["-O", "qcow2", "-o", "cluster_size=512", "--size", "1P"], ["larger cluster_size"]),
            (["--size", "8E"], ["--size", "too large"]),
        ):
            r.message_of(both.ours("measure", *arguments, check=False), *words, code=(2,))

    def test_compare(self, rand):
        both = self.both
        (both.dir / "a.raw").write_bytes(rand.randbytes(MIB) + bytes(2 * MIB))
        both.theirs("convert", "-O", "qcow2", "a.raw", "a.qcow2")
        both.theirs("convert", "-c", "-O", "qcow2", "a.raw", "packed.qcow2")
        both.theirs("convert", "-O", "qcow2", "a.raw", "longer.qcow2")
        both.theirs("resize", "-q", "longer.qcow2", "8M")
        both.theirs("convert", "-O", "qcow2", "longer.qcow2", "longest.qcow2")
        both.io("longest.qcow2", "write -P 1 7M 512")
        both.theirs("convert", "-O", "qcow2", "a.raw", "other.qcow2")
        both.io("other.qcow2", "write -P 1 100k 512")
        both.theirs("convert", "-O", "qcow2", "a.raw", "more.qcow2")
        both.io("more.qcow2", "write -P 1 2560k 512")
        names = ["a.raw", "a.qcow2", "packed.qcow2", "longer.qcow2", "longest.qcow2", "other.qcow2", "more.qcow2"]
        codes = set()
        for a in names:
            for b in names:
                codes.add(self.same_compare("pairs", a, b))
                self.same_compare("strict", "-s", a, b)
                self.same_compare("quiet", "-q", a, b)
        r.require(codes == {0, 1}, codes)
        r.message_of(both.ours("compare", "a.raw", "missing", check=False), "missing", code=(2,))
        r.message_of(both.ours("compare", "-f", "qcow2", "a.raw", "a.qcow2", check=False), "a.raw", "qcow2", code=(2,))
        done = both.ours("compare", "-p", "a.raw", "a.qcow2")
        r.require("comparing: 100.0 %" in done.stderr and "MiB of 3 MiB" in done.stderr, done.stderr)
        r.require(not both.ours("-q", "compare", "-p", "a.raw", "a.qcow2").stderr, "progress with -q")

    def test_images_in_use_are_refused(self):
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "busy", "4M")
        argv = [both.qemu_io, "-f", "qcow2", "-c", "read 0 64k", "-c", "sleep 600000", both.dir / "busy"]
        child = r.Child(self.rig, "busy", argv)
        both.wait_for_lock("busy")
        # Each waits for the lock for some seconds.
        with ThreadPoolExecutor(len(EXAMINE)) as side_by_side:
            refused = list(side_by_side.map(lambda command: both.ours(*on(command, "busy"), check=False), EXAMINE))
        for command, done in zip(EXAMINE, refused):
            r.message_of(done, "in use", "busy", "-U")
            both.ours(*on(command, "busy"), "-U")
        child.kill()

    def test_an_image_of_another_format_is_not_taken_for_a_raw_disk(self):
        both = self.both
        for form in ("vmdk", "vdi", "vhdx"):
            both.theirs("create", "-q", "-f", form, f"other.{form}", "4M")
            for command in (["info", f"other.{form}"], ["convert", "-O", "qcow2", f"other.{form}", "copy.qcow2"]):
                r.message_of(both.ours(*command, check=False), f"a {form} image", "-f raw")
            r.require(not (both.dir / "copy.qcow2").exists(), "a copy of the container was made")
            r.require("file format: raw" in both.ours("info", "-f", "raw", f"other.{form}").stdout, "not even by -f raw")

    def test_a_loop_and_a_chain_that_is_too_long_are_told_apart(self):
        both = self.both
        for number in range(258):
            below = ["-b", f"c{number - 1}", "-F", "qcow2"] if number else []
            both.theirs("create", "-q", "-u", "-f", "qcow2", *below, f"c{number}", "1M")
        for command in (["info", "--backing-chain"], ["map"]):
            both.ours(*command, "c255")
            r.message_of(both.ours(*command, "c257", check=False), "c257 has more than 256 backing images")
        both.theirs("create", "-q", "-u", "-f", "qcow2", "-b", "c1", "-F", "qcow2", "c0", "1M")
        for command in (["info", "--backing-chain"], ["map"]):
            r.message_of(both.ours(*command, "c1", check=False), "below itself")

    def test_names_in_an_image_give_the_terminal_no_commands(self):
        both, name = self.both, "/etc/shadow\x1b[2K\r\nvirtual size: 8 MiB"
        both.theirs("create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", "raw", "forged", "4M")
        done = both.ours("info", "forged")
        r.require("\x1b" not in done.stdout and "\r" not in done.stdout, repr(done.stdout))
        r.require("\nvirtual size: 8 MiB" not in done.stdout and "/etc/shadow\\u{1b}[2K" in done.stdout, repr(done.stdout))
        r.require(json.loads(both.ours("info", "--output=json", "forged").stdout)["backing-filename"] == name, "JSON has another name")

    def test_corrupt_images_are_refused_by_name(self, rand):
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "good", "4M")
        both.io("good", "write -P 7 0 1M")
        good = (both.dir / "good").read_bytes()
        l1_at = struct.unpack_from(">Q", good, 40)[0]
        l2_at = struct.unpack_from(">Q", good, l1_at)[0] & 0x00FF_FFFF_FFFF_FE00
        for at, value in ((l1_at, 1 << 63 | 1 << 50), (l1_at, 0x12200), (l2_at, 0x5_0200), (l2_at, 1 << 62 | 1 << 63)):
            bad = bytearray(good)
            struct.pack_into(">Q", bad, at, value)
            (both.dir / "bad").write_bytes(bad)
            for command in EXAMINE:
                done = both.ours(*on(command, "bad"), check=False)
                if value >> 62 != 3 or done.returncode:
                    r.message_of(done, "bad", code=(1, 2, 4))
        # Bytes flipped at random: an end in time, and no panic.
        for _ in range(60):
            bad = bytearray(good)
            for _ in range(rand.randrange(1, 6)):
                bad[rand.choice((rand.randrange(512), l1_at + rand.randrange(64), l2_at + rand.randrange(512)))] ^= 1 << rand.randrange(8)
            (both.dir / "bad").write_bytes(bad)
            for command in EXAMINE:
                done = both.ours(*on(command, "bad"), check=False)
                r.require(done.returncode in (0, 1, 2, 4) and "panicked" not in done.stderr, f"{command}: {done}")

    def test_hostile_chains_and_sizes(self):
        both = self.both
        for name, below in (("round", "circle"), ("circle", "round")):
            both.theirs("create", "-q", "-f", "qcow2", "-u", "-b", below, "-F", "qcow2", name, "1M")
        both.theirs("create", "-q", "-f", "qcow2", "-u", "-b", "x", "-F", "vmdk", "odd", "1M")
        os.mkfifo(both.dir / "fifo")
        both.theirs("create", "-q", "-f", "qcow2", "-u", "-b", "fifo", "-F", "raw", "waits", "1M")
        for command in EXAMINE:
            r.message_of(both.ours(*on(command, "round"), check=False), "round", *(["below itself"] if command != ["compare"] else []))
            r.message_of(both.ours(*on(command, "odd"), check=False), "odd", "vmdk")
            r.message_of(both.ours(*on(command, "waits"), check=False), "fifo")
        # A backing image without a format: nothing is guessed from what a guest wrote.
        both.theirs("create", "-q", "-f", "qcow2", "-u", "-b", "base", "-F", "raw", "unnamed", "1M")
        image = bytearray((both.dir / "unnamed").read_bytes())
        at = image.index(struct.pack(">II", 0xE2792ACA, 3))
        struct.pack_into(">I", image, at, 0x12345678)
        (both.dir / "unnamed").write_bytes(image)
        for command in EXAMINE:
            r.message_of(both.ours(*on(command, "unnamed"), check=False), "unnamed", "format", "image rebase -u")
        # A sparse file that claims a huge disk ends in time.
        both.theirs("create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", "vast", "2E")
        for command in (["map"], ["map", "--output=json"], ["measure", "-O", "qcow2", "-o", "cluster_size=2M"]):
            both.ours(*command, "vast")
        r.message_of(both.ours("measure", "-O", "qcow2", "vast", check=False), "larger cluster_size")

    def test_an_unknown_feature_is_named_from_the_table_of_the_image(self):
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "future", "1M")
        image = bytearray((both.dir / "future").read_bytes())
        image[72 + 4] |= 1  # incompatible feature 24
        at = image.index(b"dirty bit") - 2
        image[at : at + 48] = struct.pack(">BB46s", 0, 24, b"time \x1b[31mtravel")
        (both.dir / "future").write_bytes(image)
        for command in (["info"], ["map"], ["check"]):
            done = both.ours(*command, "future", check=False)
            r.message_of(done, "future", "features", "time", "travel")
            r.require("\x1b" not in done.stderr, "a name from the image controls the terminal")
