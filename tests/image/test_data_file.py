"""Tests new images whose data file is there already: it is kept or emptied only if that is asked for."""

import pytest
import rig as r

MIB = 1 << 20
RAW = "data_file=guest.raw,data_file_raw=on"


def guest(both, size=MIB):
    """A file with a guest's data, in which there are holes."""
    path = both.dir / "guest.raw"
    with open(path, "wb") as f:
        f.truncate(size)
        f.seek(size - 4096)
        f.write(b"K" * 4096)
    (both.dir / "new.qcow2").unlink(missing_ok=True)
    return path.read_bytes()


@pytest.mark.parametrize("arguments", [
    ["create", "-f", "qcow2", "-o", "data_file=guest.raw", "new.qcow2", "1M"],
    ["create", "-f", "qcow2", "-o", RAW, "new.qcow2", "1M"],
    ["create", "-f", "qcow2", "-o", "data_file=guest.raw,preallocation=full", "new.qcow2", "4M"],
    ["create", "-f", "qcow2", "-o", "data_file=sub/../guest.raw", "new.qcow2", "1M"],
    ["create", "-f", "qcow2", "-o", "data_file=link.raw", "new.qcow2", "1M"],
    ["convert", "-O", "qcow2", "-o", "data_file=guest.raw", "other.raw", "new.qcow2"],
    ["convert", "-O", "qcow2", "-o", RAW, "other.raw", "new.qcow2"],
], ids=lambda words: f"{words[0]} {words[4]}")
def test_a_data_file_with_data_is_emptied_only_on_demand(both, arguments):
    before = guest(both)
    (both.dir / "sub").mkdir(exist_ok=True)
    if not (both.dir / "link.raw").is_symlink():
        (both.dir / "link.raw").symlink_to("guest.raw")
    (both.dir / "other.raw").write_bytes(b"O" * MIB)
    done = both.ours(*arguments, check=False)
    r.message_of(done, "has data", "keep_data_file=off", code=(1,))
    r.require("Formatting" not in done.stdout and not (both.dir / "new.qcow2").exists(), "an image is made")
    r.require((both.dir / "guest.raw").read_bytes() == before, "the data is lost")
    # What the message says.
    options = f"{arguments[4]},keep_data_file=off"
    both.ours(*arguments[:4], options, *arguments[5:])
    both.clean("new.qcow2")
    r.require((both.dir / "guest.raw").read_bytes() != before, "the file is as before")


def test_a_data_file_without_data_is_used(both):
    """An empty one, one with holes only, and one of zeroes, as a command that is repeated finds it."""
    for contents in ("empty", "holes", "zeroes"):
        guest(both)
        with open(both.dir / "guest.raw", "wb") as f:
            if contents == "zeroes":
                f.write(bytes(2 * MIB))
            f.truncate(0 if contents == "empty" else 2 * MIB)
        for _ in range(2):
            both.ours("create", "-q", "-f", "qcow2", "-o", f"{RAW},preallocation=full", "new.qcow2", "1M")
        r.require((both.dir / "guest.raw").read_bytes() == bytes(MIB), f"{contents}: another size")
        both.clean("new.qcow2", contents)


def test_a_copy_replaces_an_image_with_its_data_file(both):
    guest(both)
    for letter in (b"1", b"2"):
        (both.dir / "other.raw").write_bytes(letter * MIB)
        both.ours("convert", "-O", "qcow2", "-o", "data_file=own.data,data_file_raw=on", "other.raw", "own.qcow2")
        r.require((both.dir / "own.data").read_bytes() == letter * MIB, "the data file is not the copy")
    # Nothing else is emptied: not by `create`, and not the file of another image.
    r.message_of(both.ours("create", "-f", "qcow2", "-o", "data_file=own.data", "own.qcow2", "1M", check=False), "own.data has data", code=(1,))
    r.message_of(both.ours("convert", "-O", "qcow2", "-o", "data_file=guest.raw", "other.raw", "own.qcow2", check=False),
                 "guest.raw has data", code=(1,))


@pytest.mark.parametrize("options", ["data_file_raw=on", "preallocation=metadata", "extended_l2=on,data_file_raw=on"])
@pytest.mark.parametrize(("size", "disk"), [(MIB, "1M"), (MIB, "3M"), (3 * MIB, "1M"), (MIB - 512, "1M")])
def test_a_data_file_that_is_kept_is_the_disk(both, options, size, disk):
    """As in QEMU 11.1: a shorter file grows, a longer one stays. Both programs read its contents."""
    before = guest(both, size)
    both.ours("create", "-f", "qcow2", "-o", f"data_file=guest.raw,keep_data_file=on,{options}", "new.qcow2", disk)
    wanted = int(disk[:-1]) * MIB
    after = (both.dir / "guest.raw").read_bytes()
    r.require(after == before + bytes(max(0, wanted - size)), "the data file is another")
    both.clean("new.qcow2")
    for run, copy in ((both.ours, "mine"), (both.theirs, "their")):
        run("convert", "-f", "qcow2", "-O", "raw", "new.qcow2", copy)
        r.require((both.dir / copy).read_bytes() == after[:wanted], f"{copy}: the disk is not the file")


def test_what_cannot_be_kept_is_refused_by_name(both):
    """The cases that QEMU 11.1 refuses, and those in which the data would be hidden or lost."""
    before = guest(both)
    (both.dir / "base.raw").write_bytes(b"B" * MIB)
    keep = "data_file=guest.raw,keep_data_file=on"
    for options, more, words, code in (
        (keep, [], ("data_file_raw=on", "preallocation=metadata"), 2),
        (f"{keep},preallocation=falloc", [], ("keep_data_file", "overwritten"), 2),
        (f"{keep},data_file_raw=on,preallocation=full", [], ("keep_data_file", "overwritten"), 2),
        (f"{keep},preallocation=metadata,extended_l2=on", ["-b", "base.raw", "-F", "raw"], ("keep_data_file", "hidden"), 2),
        ("keep_data_file=on", [], ("data_file",), 2),
        ("data_file=none.raw,data_file_raw=on,keep_data_file=on", [], ("none.raw", "No such file"), 1),
        ("data_file=new.qcow2", [], ("its own data file",), 2),
    ):
        done = both.ours("create", "-f", "qcow2", "-o", options, *more, "new.qcow2", "1M", check=False)
        r.message_of(done, *words, code=(code,))
        r.require(not (both.dir / "new.qcow2").exists() and not (both.dir / "none.raw").exists(), f"{options}: a file is made")
    r.message_of(both.ours("convert", "-O", "qcow2", "-o", f"{keep},data_file_raw=on", "base.raw", "new.qcow2", check=False),
                 "a copy overwrites its data file", code=(2,))
    for more in ([], ["-U"]):
        done = both.ours("convert", *more, "-O", "qcow2", "-o", "data_file=guest.raw,keep_data_file=off", "guest.raw", "new.qcow2", check=False)
        r.message_of(done, "guest.raw", "itself", code=(2,))
    r.require((both.dir / "guest.raw").read_bytes() == before, "the data is lost")
    both.ours("create", "-q", "-f", "qcow2", "-o", f"{keep},data_file_raw=on", "new.qcow2", "1M")
    r.message_of(both.ours("amend", "-o", "keep_data_file=on", "new.qcow2", check=False), "new image", code=(2,))
