"""Tests `vshunt image convert`: the guest's view is the same before and after.

`qemu-img compare` and `check` judge images that vshunt writes. Data that vshunt reads from QEMU's
images is compared with QEMU's own copy.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import qcow2_deflate
import rig as r
from images import commands_of, options_of, text_of

MIB = 1 << 20
# Images copied of each kind of test, with options drawn at random.
COPIES = 12


class TestCopies:
    """Tests of copies between formats and options."""

    @pytest.fixture(autouse=True)
    def _given(self, rig, both):
        self.rig, self.both = rig, both

    def same(self, a, a_format, b, b_format, of):
        """A guest reads the same of both, and neither is corrupt."""
        done = self.both.theirs("compare", "-f", a_format, "-F", b_format, a, b, check=False)
        r.require(done.returncode == 0, f"{of}: {a} and {b} differ: {done.stdout}{done.stderr}")
        for name, form in ((a, a_format), (b, b_format)):
            if form == "qcow2":
                done = self.both.theirs("check", "-f", "qcow2", name, check=False)
                r.require(done.returncode == 0, f"{of}: {name}: {done.stdout}{done.stderr[:600]}")

    def contents(self, rand, name, size):
        """A raw image of zeroes, data that becomes smaller and data that does not, in pieces of all sizes."""
        with open(self.both.dir / name, "wb") as f:
            f.truncate(size)
            at = 0
            while at < size:
                n = min(rand.choice((512, 4096, 65536, 300032, MIB)), size - at)
                data = (None, b"\0" * n, b"abcdefgh" * (n // 8), rand.randbytes(n))[rand.randrange(4)]
                if data:
                    f.seek(at)
                    f.write(data)
                at += n
        return name

    def test_between_formats_and_options(self, rand):
        """QEMU's images of all kinds to raw and to other options, and back."""
        both = self.both
        for n in range(COPIES):
            options, size = options_of(rand)
            source = f"from{n}"
            of = f"{n}: {text_of(options, source)}"
            both.theirs("create", "-q", "-f", "qcow2", "-o", text_of(options, source), source, size)
            both.io(source, *commands_of(rand, options, size, 12))
            both.ours("convert", source, f"{n}.raw")
            self.same(source, "qcow2", f"{n}.raw", "raw", of)
            wanted, _ = options_of(rand)
            text = text_of(wanted, f"to{n}")
            both.ours("convert", "-f", "qcow2", "-O", "qcow2", "-o", text, source, f"to{n}")
            self.same(source, "qcow2", f"to{n}", "qcow2", f"{of} to {text}")
            both.ours("convert", "-f", "raw", "-O", "qcow2", "-o", text, f"{n}.raw", f"to{n}")
            self.same(source, "qcow2", f"to{n}", "qcow2", f"raw to {text}, once more")

    def test_of_compressed_clusters(self, rand):
        """Every kind of compressed target; the last cluster is not whole."""
        both = self.both
        size = 5 * MIB + 512
        self.contents(rand, "plain.raw", size)
        for kind in ("zlib", "zstd"):
            for bits in (9, 10, 12, 14, 16, 18, 21):
                more = ",extended_l2=on" if bits >= 14 and rand.randrange(2) else ""
                options = f"compression_type={kind},cluster_size={1 << bits}{more}"
                both.ours("convert", "-c", "-O", "qcow2", "-o", options, "plain.raw", "packed")
                self.same("plain.raw", "raw", "packed", "qcow2", options)
                both.ours("convert", "packed", "back.raw")
                self.same("plain.raw", "raw", "back.raw", "raw", f"{options}, back")
        both.ours("convert", "-c", "-O", "qcow2", "-o", "compat=0.10", "plain.raw", "packed")
        self.same("plain.raw", "raw", "packed", "qcow2", "compat=0.10")
        # It is compressed indeed, and what QEMU compressed is read.
        (both.dir / "text.raw").write_bytes(b"all work and no play\n" * 100 * 512)
        both.ours("convert", "-c", "-O", "qcow2", "text.raw", "packed")
        space = os.stat(both.dir / "packed").st_blocks * 512
        r.require(space < 600 << 10, f"1 MiB of repeated text takes {space} bytes compressed")
        for kind in ("zlib", "zstd"):
            both.theirs("convert", "-c", "-O", "qcow2", "-o", f"compression_type={kind}", "plain.raw", "packed")
            both.ours("convert", "packed", "back.raw")
            self.same("plain.raw", "raw", "back.raw", "raw", f"QEMU's {kind}")

    def test_deflate_clusters_have_the_window_of_qemu(self):
        """A program with a window of 4 KiB reads them, as it reads QEMU's."""
        both = self.both
        plain = qcow2_deflate.far_repetitions(5 * MIB + 512)
        (both.dir / "far.raw").write_bytes(plain)
        for bits in (9, 12, 14, 16, 18, 21):
            for more in ("", ",extended_l2=on") if bits >= 14 else ("", ",compat=0.10"):
                options = f"cluster_size={1 << bits}{more}"
                for run, name in ((both.ours, "mine"), (both.theirs, "their")):
                    run("convert", "-c", "-O", "qcow2", "-o", options, "far.raw", f"far.{name}")
                found = [qcow2_deflate.check(both.dir / f"far.{name}", plain, name == "mine") for name in ("mine", "their")]
                # Each begins at a sector here, so that one of 512 bytes never becomes smaller.
                r.require(found[1] and (found[0] or bits == 9), f"{options}: {found} clusters are compressed")
                self.same("far.raw", "raw", "far.mine", "qcow2", options)

    def test_of_a_chain_stands_alone(self, rand):
        both = self.both
        self.contents(rand, "low.raw", 3 * MIB)
        both.theirs("create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "-b", "low.raw", "-F", "raw", "middle", "4M")
        both.io("middle", "write -P 1 100k 300k", "write -z 1M 500k", "discard 2M 64k")
        both.ours("create", "-q", "-f", "qcow2", "-o", "extended_l2=on", "-b", "middle", "-F", "qcow2", "top", "6M")
        both.io("top", "write -P 2 200k 100k", "write -z 5M 100k", "write -P 3 2M 2k")
        both.ours("convert", "top", "flat.raw")
        self.same("top", "qcow2", "flat.raw", "raw", "to raw")
        for more in ([], ["-c"]):
            both.ours("convert", *more, "-O", "qcow2", "top", "flat")
            self.same("top", "qcow2", "flat", "qcow2", f"to qcow2 {more}")
            r.require("backing" not in both.ours("info", "flat").stdout, "the copy stands on an image")

    def test_onto_an_image_that_is_there(self, rand):
        """`convert -n` writes into an existing target.

        Zeroes of the source replace its old data.
        """
        both = self.both
        self.contents(rand, "new.raw", 4 * MIB)
        (both.dir / "old.raw").write_bytes(b"\x55" * (4 * MIB))
        for options in ("", "compat=0.10", "extended_l2=on", "cluster_size=2M", "cluster_size=512", "data_file=DATA,data_file_raw=on"):
            form = ["-o", options.replace("DATA", "old.data")] if options else []
            both.theirs("convert", "-O", "qcow2", *form, "old.raw", "old")
            both.ours("convert", "-n", "-O", "qcow2", "new.raw", "old")
            self.same("new.raw", "raw", "old", "qcow2", f"-n onto {options}")
        # One that stands on another must not show that.
        both.theirs("create", "-q", "-f", "qcow2", "-b", "old.raw", "-F", "raw", "over")
        both.ours("convert", "-n", "-O", "qcow2", "new.raw", "over")
        self.same("new.raw", "raw", "over", "qcow2", "-n onto an overlay")
        both.ours("convert", "-n", "new.raw", "old.raw")
        self.same("new.raw", "raw", "old.raw", "raw", "-n onto raw")
        both.theirs("create", "-q", "-f", "qcow2", "short", "3M")
        r.message_of(both.ours("convert", "-n", "-O", "qcow2", "new.raw", "short", check=False), "short", "as large")
        r.message_of(both.ours("convert", "-n", "new.raw", "nowhere", check=False), "nowhere", "-n")
        r.require(not (both.dir / "nowhere").exists(), "-n made a file")

    def test_onto_a_larger_image(self, rand):
        """Only a smaller one is refused. What is behind the copy stays, as with qemu-img."""
        both = self.both
        old = b"\x55" * (4 * MIB)
        (both.dir / "full.raw").write_bytes(old)
        for size in (MIB, 2 * MIB + 512, 3 * MIB + 65536):
            self.contents(rand, "part.raw", size)
            wanted = (both.dir / "part.raw").read_bytes() + old[size:]
            for form, options in (("raw", ""), ("qcow2", ""), ("qcow2", "extended_l2=on"), ("qcow2", "cluster_size=2M"),
                                  ("qcow2", "cluster_size=512"), ("qcow2", "data_file=roomy.data,keep_data_file=off")):
                for more in ([], ["-c"]) if form == "qcow2" and "data" not in options else ([],):
                    of = f"{size} bytes onto {form} {options} {more}"
                    both.ours("convert", "-O", form, *(["-o", options] if options else []), "full.raw", "roomy")
                    done = both.ours("convert", "-n", *more, "-O", form, "part.raw", "roomy")
                    r.require("roomy" in done.stderr and f"{4 * MIB - size} bytes" in done.stderr, f"{of}: {done.stderr}")
                    both.ours("convert", "-f", form, "roomy", "roomy.raw")
                    r.require((both.dir / "roomy.raw").read_bytes() == wanted, f"{of}: other contents")
                    if form == "qcow2":
                        both.clean("roomy", of)
        for form in ("raw", "qcow2"):
            both.ours("create", "-q", "-f", form, "tight", "1M")
            r.message_of(both.ours("convert", "-n", "-O", form, "part.raw", "tight", check=False), "tight", "as large, or larger")

    @pytest.mark.root
    def test_onto_a_device(self, rand):
        """A volume is rounded up, so it is larger than the disk. One that is too small is not touched."""
        both = self.both
        size = 3 * MIB + 512
        self.contents(rand, "part.raw", size)
        both.ours("convert", "-O", "qcow2", "part.raw", "part")
        old = b"\x55" * (8 * MIB)
        volume = both.dir / "volume"
        for bytes_, more, form in ((8 * MIB, [], "raw"), (8 * MIB, ["-n"], "raw"), (8 * MIB, [], "qcow2"), (MIB, [], "raw"), (MIB, ["-n"], "raw")):
            volume.write_bytes(old[:bytes_])
            with r.loop_device(volume) as device:
                done = both.ours("convert", *more, "-f", "qcow2", "-O", form, "part", device, check=False)
                of = f"{bytes_} bytes, {more}, {form}: {done.stdout}{done.stderr}"
                if bytes_ == MIB:
                    r.message_of(done, device, "larger")
                    r.require(Path(device).read_bytes() == old[:bytes_], f"{of}: it is changed")
                    continue
                r.require(done.returncode == 0, of)
                if form == "raw":
                    r.require(Path(device).read_bytes() == (both.dir / "part.raw").read_bytes() + old[size:], f"{of}: other contents")
                    r.require(f"{bytes_ - size} bytes" in done.stderr, of)
                else:
                    self.same("part.raw", "raw", device, "qcow2", of)

    def test_of_an_image_in_use(self):
        """QEMU writes it: refused, but with -U."""
        both = self.both
        both.theirs("create", "-q", "-f", "qcow2", "busy", "4M")
        both.io("busy", "write -P 7 0 1M")
        argv = [both.qemu_io, "-f", "qcow2", "-c", "read 0 64k", "-c", "sleep 600000", both.dir / "busy"]
        child = r.Child(self.rig, "busy", argv)
        both.wait_for_lock("busy")
        r.message_of(both.ours("convert", "busy", "busy.raw", check=False), "in use", "busy")
        r.require(not (both.dir / "busy.raw").exists(), "a file is left behind")
        both.ours("convert", "-U", "busy", "busy.raw")
        r.message_of(both.ours("convert", "-f", "raw", "-O", "raw", "busy.raw", "busy", check=False), "in use", "busy")
        child.kill()
        self.same("busy", "qcow2", "busy.raw", "raw", "-U")

    def test_replaces_what_was_there(self, rand):
        both = self.both
        self.contents(rand, "little.raw", 2 * MIB)
        for form, target in (("raw", "there.raw"), ("qcow2", "there")):
            (both.dir / target).write_bytes(rand.randbytes(5 * MIB))
            both.ours("convert", "-O", form, "little.raw", target)
            self.same("little.raw", "raw", target, form, f"over an old file, to {form}")
        # A data file that is there, too.
        (both.dir / "there.data").write_bytes(rand.randbytes(5 * MIB))
        both.ours("convert", "-O", "qcow2", "-o", "data_file=there.data,data_file_raw=on,keep_data_file=off", "little.raw", "there")
        self.same("little.raw", "raw", "there", "qcow2", "over an old data file")
        self.same("little.raw", "raw", "there.data", "raw", "the data file by itself")

    def test_never_harms_what_it_reads(self, rand):
        """A target is refused if it is the source under another name, or a file below it."""
        both = self.both
        self.contents(rand, "base.raw", MIB)
        both.theirs("create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "stands")
        both.ours("convert", "-O", "qcow2", "-o", "data_file=split.data", "base.raw", "split")
        os.link(both.dir / "base.raw", both.dir / "hard.raw")
        os.symlink("base.raw", both.dir / "soft.raw")
        for source, target, words in (
            ("base.raw", "base.raw", ["base.raw", "itself"]),
            ("base.raw", "./base.raw", ["base.raw", "itself"]),
            ("base.raw", "soft.raw", ["base.raw", "itself"]),
            ("base.raw", "hard.raw", ["base.raw", "itself"]),
            ("stands", "base.raw", ["stands", "consists", "base.raw"]),
            ("stands", "hard.raw", ["stands", "hard.raw"]),
            ("split", "split.data", ["split", "split.data"]),
        ):
            before = {name: (both.dir / name).read_bytes() for name in ("base.raw", "stands", "split", "split.data")}
            r.message_of(both.ours("convert", source, target, check=False), *words)
            for name, data in before.items():
                r.require((both.dir / name).read_bytes() == data, f"{source} to {target}: {name} is another")

    def test_without_space(self, rand):
        """A target without space: the error names it, and nothing is left of it."""
        both = self.both
        folder = both.dir / "small"
        folder.mkdir()
        done = r.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False)
        if done.returncode:
            raise r.Skipped(f"no tmpfs can be mounted: {done.stderr.strip()}")
        try:
            (both.dir / "much.raw").write_bytes(rand.randbytes(8 * MIB))
            for form, more in (("raw", []), ("qcow2", []), ("qcow2", ["-c"]), ("qcow2", ["-o", "data_file=much.data"])):
                done = both.ours("convert", *more, "-O", form, "much.raw", folder / "much", check=False)
                r.message_of(done, "small/much", "space")
                left = sorted(p.name for p in folder.iterdir())
                r.require(not left, f"{form} {more}: left behind: {left}")
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)

    def test_that_cannot_be_made_is_refused_by_name(self):
        both = self.both
        for name, size in (("none.raw", 0), ("good.raw", MIB)):
            with open(both.dir / name, "wb") as f:
                f.truncate(size)
        (both.dir / "junk").write_bytes(b"QFI\xfb\0\0\0\x03" + b"\xff" * 504)
        for arguments, words in (
            (["missing", "out"], ["missing"]),
            (["good.raw", "nowhere/out"], ["nowhere/out"]),
            (["-c", "good.raw", "out"], ["-c", "-O qcow2"]),
            (["-c", "-O", "qcow2", "-o", "data_file=out.data", "good.raw", "out"], ["leave out -c, or data_file"]),
            (["-c", "-O", "qcow2", "-o", "data_file=out.data,data_file_raw=on", "good.raw", "out"], ["leave out -c, or data_file"]),
            (["-c", "-O", "qcow2", "-o", "preallocation=metadata", "good.raw", "out"], ["leave out -c, or preallocation"]),
            (["-c", "-O", "qcow2", "-o", "preallocation=falloc", "good.raw", "out"], ["leave out -c, or preallocation"]),
            (["-c", "-O", "qcow2", "-o", "preallocation=full", "good.raw", "out"], ["leave out -c, or preallocation"]),
            (["-O", "qcow2", "none.raw", "out"], ["none.raw", "0 bytes"]),
            (["junk", "out"], ["junk"]),
            (["-f", "qcow2", "good.raw", "out"], ["good.raw"]),
            (["-O", "qcow2", "-o", "colour=red", "good.raw", "out"], ["colour"]),
            (["-O", "qcow2", "-o", "size=5M", "good.raw", "out"], ["size"]),
            (["-O", "qcow2", "-o", "backing_file=good.raw,backing_fmt=raw", "good.raw", "out"], ["backing_file"]),
            (["-O", "qcow2", "-n", "-o", "compat=v2", "good.raw", "out"], ["-n"]),
        ):
            r.message_of(both.ours("convert", *arguments, check=False), *words)
            r.require(not any((both.dir / name).exists() for name in ("out", "out.data")), f"{arguments} left a file behind")
        both.ours("create", "-q", "-f", "qcow2", "-o", "data_file=apart.data", "apart", "1M")
        r.message_of(both.ours("convert", "-n", "-c", "-O", "qcow2", "good.raw", "apart", check=False), "apart.data", "leave out -c")
        both.ours("convert", "-c", "-O", "qcow2", "-o", "preallocation=off", "good.raw", "out")

    def test_says_how_fast_it_was(self, rand):
        """A line at the end; progress on request, also of compressed clusters; nothing with -q."""
        both = self.both
        (both.dir / "loud.raw").write_bytes(b"all work and no play\n" * (64 * MIB // 21) + rand.randbytes(8 * MIB))
        size = os.stat(both.dir / "loud.raw").st_size // 512 * 512 + 512
        for more in ([], ["-c"]):
            done = both.ours("convert", *more, "-O", "qcow2", "loud.raw", "loud")
            line = rf"Copied 72 MiB \({size} bytes\) in \d+\.\d{{3}} s, [0-9.]+ [KMG]iB/s\n"
            r.require(re.fullmatch(line, done.stdout) and not done.stderr, f"{more}: {done}")
            done = both.ours("convert", "-p", *more, "-O", "qcow2", "loud.raw", "loud")
            lines = done.stderr.splitlines()
            shown = r"converting: [0-9.]+ %, [0-9.]+ [KM]?i?B of 72 MiB, [0-9.]+ [KMG]?i?B/s, (\d+:\d\d:\d\d|unknown time) left"
            r.require(lines and all(re.fullmatch(shown, x) for x in lines), f"{more}: {done}")
            r.require(" 100.0 %, 72 MiB of" in lines[-1], f"{more}: {done}")
            done = both.ours("-q", "convert", "-p", *more, "-O", "qcow2", "loud.raw", "loud")
            r.require(not done.stdout + done.stderr, f"-q: {done}")

    def test_the_last_of_several_options_wins(self, rand):
        both = self.both
        self.contents(rand, "plain2.raw", MIB)
        options = ["-o", "cluster_size=4k,compat=0.10", "-o", "cluster_size=128k", "-o", "compat=1.1,cluster_size=32k"]
        for run in (both.ours, both.theirs):
            run("convert", "-O", "qcow2", *options, "plain2.raw", "last")
            found = json.loads(both.ours("info", "--output=json", "last").stdout)
            r.require((found["cluster-size"], found["format-specific"]["data"]["compat"]) == (32768, "1.1"), found)
        both.ours("create", "-q", "-f", "qcow2", "-o", "data_file=a", "-o", "data_file=b,,c", "comma", "1M")
        r.require((both.dir / "b,c").exists() and not (both.dir / "a").exists(), "the name of the data file")

    def test_help_lists_the_options_of_the_format(self):
        both = self.both
        for command in (["convert", "a", "b", "-O"], ["create", "a", "-f"], ["measure", "-O"]):
            for word in ("help", "?", "compat=v3,help"):
                text = both.ours(*command, "qcow2", "-o", word).stdout
                r.require("cluster_size" in text and "Options of raw" not in text, text)
                text = both.ours(*command, "raw", "-o", word).stdout
                r.require("preallocation" in text and "cluster_size" not in text, text)
