"""Tests how `vshunt image` takes its arguments: lists of options, names that disagree, options of qemu-img that are absent."""

import json

import rig as r

MIB = 1 << 20


def test_options_are_listed_without_an_image(both):
    for command, word in ((["create", "-f", "qcow2"], "lazy_refcounts"), (["create"], "preallocation"), (["amend"], "lazy_refcounts"),
                          (["convert", "-O", "qcow2"], "compression_type"), (["measure", "-O", "qcow2"], "extended_l2")):
        done = both.ours(*command, "-o", "help")
        r.require(word in done.stdout and not done.stderr, f"{command}: {done.stdout}{done.stderr}")
    for command in (["create", "-f", "qcow2"], ["convert"], ["convert", "one"]):
        r.message_of(both.ours(*command, check=False), "give", "name", code=(2,))


def test_a_name_that_disagrees_with_the_format_is_told(both):
    both.ours("create", "-q", "-f", "qcow2", "a.raw", "1M")
    both.ours("create", "-q", "-f", "raw", "b.qcow2", "1M")
    both.ours("create", "-q", "-f", "qcow2", "c.img", "1M")
    for name, word, other in (("a.raw", "as a qcow2 image", "-f raw"), ("b.qcow2", "not begin", "-f qcow2")):
        done = both.ours("info", name)
        lines = done.stderr.splitlines()
        r.require(len(lines) == 1 and all(x in lines[0] for x in ("warning: " + name, word, "rename it", other)), done.stderr)
    for arguments in (["-f", "qcow2", "a.raw"], ["-f", "raw", "b.qcow2"], ["c.img"]):
        r.require(not both.ours("info", *arguments).stderr, f"{arguments}: a warning")


def test_onto_an_image_that_reads_as_zeroes(both):
    """`convert -n --target-is-zero` writes data only, as qemu-img does."""
    (both.dir / "from").write_bytes(b"\x11" * MIB + bytes(MIB))
    for to, ours in (("mine", True), ("their", False)):
        # The bytes show what is written.
        (both.dir / to).write_bytes(b"\x55" * (2 * MIB))
        run = both.ours if ours else both.theirs
        run("convert", "-n", "--target-is-zero", "-f", "raw", "-O", "raw", "from", to)
        data = (both.dir / to).read_bytes()
        r.require(data == b"\x11" * MIB + b"\x55" * MIB, f"{to}: zeroes are written, or data is not")
    r.message_of(both.ours("convert", "--target-is-zero", "from", "new", check=False), "-n", code=(2,))


def test_an_image_is_not_made_below_itself(both):
    """It would be overwritten, with all that stands on it."""
    both.ours("create", "-q", "-f", "qcow2", "one.qcow2", "1M")
    both.ours("create", "-q", "-f", "qcow2", "-b", "one.qcow2", "-F", "qcow2", "two.qcow2")
    (both.dir / "base.raw").write_bytes(b"\x77" * MIB)
    (both.dir / "link.qcow2").symlink_to("two.qcow2")
    before = {name: (both.dir / name).read_bytes() for name in ("one.qcow2", "two.qcow2", "base.raw")}
    for below, image, word, more in (
        ("two.qcow2", "two.qcow2", "below itself", []),
        ("./two.qcow2", "two.qcow2", "below itself", []),
        ("two.qcow2", "link.qcow2", "below itself", []),
        ("two.qcow2", "two.qcow2", "below itself", ["-u", "1M"]),
        ("two.qcow2", "one.qcow2", "two.qcow2 stands on one.qcow2", []),
        ("link.qcow2", "one.qcow2", "link.qcow2 stands on one.qcow2", ["2M"]),
    ):
        done = both.ours("create", "-f", "qcow2", "-b", below, "-F", "qcow2", image, *more, check=False)
        r.message_of(done, word, code=(2,))
        r.require("Formatting" not in done.stdout, f"it prints {done.stdout} first")
    done = both.ours("create", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "-o", "data_file=base.raw", "new.qcow2", check=False)
    r.message_of(done, "below itself", code=(2,))
    for name, data in before.items():
        r.require((both.dir / name).read_bytes() == data, f"{name} is overwritten")
    r.require(not (both.dir / "new.qcow2").exists(), "a new image is left")


def test_bitmaps_are_copied(both):
    """`convert --bitmaps` as qemu-img does it; the bits are compared in a unit test."""
    both.ours("create", "-q", "-f", "qcow2", "marked", "8M")
    both.ours("bitmap", "--add", "-g", "4096", "marked", "b0")
    both.ours("bitmap", "--add", "--disable", "marked", "b1")
    both.io("marked", "write -P 7 1M 64k")
    for to, run in (("marked.mine", both.ours), ("marked.their", both.theirs)):
        run("convert", "--bitmaps", "-O", "qcow2", "marked", to)
        both.clean(to)
    infos = [json.loads(both.theirs("info", "--output=json", to).stdout) for to in ("marked.mine", "marked.their")]
    lists = [info["format-specific"]["data"]["bitmaps"] for info in infos]
    r.require(lists[0] == lists[1] and len(lists[0]) == 2, f"{lists[0]} is not {lists[1]}")
    r.message_of(both.ours("convert", "--bitmaps", "marked", "marked.raw", check=False), "--bitmaps", "-O qcow2", code=(2,))
    old = both.ours("convert", "--bitmaps", "-O", "qcow2", "-o", "compat=0.10", "marked", "old", check=False)
    r.message_of(old, "compat=0.10", "bitmaps", code=(1,))
    # They cover a whole disk: one of another size gets none, and no copy either.
    both.theirs("create", "-q", "-f", "qcow2", "longer", "64M")
    before = (both.dir / "longer").read_bytes()
    r.message_of(both.ours("convert", "-n", "--bitmaps", "-O", "qcow2", "marked", "longer", check=False), "longer", "--bitmaps", code=(1,))
    r.require((both.dir / "longer").read_bytes() == before, "something was copied")
    r.require(not (both.dir / "old").exists(), "an incomplete copy is left")


def test_options_of_qemu_img_that_are_absent_have_a_reason(both):
    for arguments, words in (
        (["convert", "-m", "8", "a", "b"], ("-m", "vshunt chooses", "leave it out")),
        (["convert", "-B", "base", "-F", "raw", "a", "b"], ("-B", "create -b")),
        (["convert", "-b", "base", "-F", "raw", "a", "b"], ("-b", "create -b")),
        (["convert", "-l", "one", "a", "b"], ("-l", "image snapshot -a")),
        (["commit", "a"], ("image commit", "vshunt commit")),
    ):
        r.message_of(both.ours(*arguments, check=False), *words, code=(2,))


def test_what_is_missing_or_wrong_is_named(both):
    """Words of the command line: exit status 2, and nothing is made."""
    both.ours("create", "-q", "-f", "qcow2", "thin", "1M")
    both.ours("create", "-q", "-f", "raw", "thick", "1M")
    before = sorted(path.name for path in both.dir.iterdir())
    for arguments, words in (
        (["create", "new"], ("new: how large?", "20G")),
        (["create", "-f", "qcow2", "-o", "compat=2", "new", "1M"], ("compat=2", "0.10", "1.1")),
        (["bitmap", "thin", "b0"], ("--add", "--remove", "--clear", "--merge", "--enable", "--disable")),
        (["dd", "if"], ("if=FILE", "of=FILE")),
        (["dd", "if=thick", "of=new", "bs=0"], ("bs=0", "from 1 to")),
        (["dd", "if=thick", "of=new", "seek=4"], ("seek=4", "if, of, bs, count and skip")),
        (["resize", "--preallocation", "metadata", "-f", "raw", "thick", "2M"], ("raw", "off, falloc and full")),
    ):
        r.message_of(both.ours(*arguments, check=False), *words, code=(2,))
    # qemu-img has this exit status for it.
    r.message_of(both.ours("check", "-f", "raw", "thick", check=False), "format raw cannot be checked", code=(63,))
    r.message_of(both.ours("snapshot", "-l", "-f", "raw", "thick", check=False), "format raw have no snapshots", code=(1,))
    after = sorted(path.name for path in both.dir.iterdir())
    r.require(before == after, f"files were made: {after}")
