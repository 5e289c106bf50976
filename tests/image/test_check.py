"""Tests `vshunt image` against qemu-img.

Each program checks, describes and changes images of the other.

Both check and describe images of qemu-img with combinations of all features, with the same
result. QEMU's programs open, fill and check images of vshunt. Corrupt images (bytes flipped,
seeded) are found and repaired. Hostile images end in time.

VSHUNT_SEED sets the seed of the generator.
"""

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import rig as r
from images import HANG_S, commands_of, options_of, same_children, text_of, with_base
from seeds import SEED

# Images of each kind of test.
COMBINATIONS = 24
CORRUPTIONS = 40


def test_both_check_and_describe_images_of_qemu_img_alike(both, rand):
    """Images of qemu-img: both check and describe them alike, filled or not."""
    for n in range(COMBINATIONS):
        options, size = options_of(rand)
        name = f"their{n}"
        arguments = ["-q", "-f", "qcow2", "-o", text_of(options, name)]
        of = f"{n} of seed {SEED}: {arguments[-1]}"
        both.theirs("create", *with_base(both, rand, arguments, options), name, size)
        r.require(both.same_check(name, of) == 0, f"{of}: not clean")
        both.same_info(name, of)
        both.io(name, *commands_of(rand, options, size, 12))
        r.require(both.same_check(name, of) == 0, f"{of}: not clean once filled")
        both.same_info(name, of)


def test_qemu_fills_and_checks_our_images(both, rand):
    """Images of vshunt: QEMU fills them, and they are clean; the data is there."""
    for n in range(COMBINATIONS):
        options, size = options_of(rand)
        name = f"our{n}"
        arguments = ["-q", "-f", "qcow2", "-o", text_of(options, name)]
        of = f"{n} of seed {SEED}: {arguments[-1]}"
        both.ours("create", *with_base(both, rand, arguments, options), name, size)
        r.require(both.same_check(name, of) == 0, f"{of}: not clean")
        both.same_info(name, of)
        both.io(name, *commands_of(rand, options, size, 12))
        end = size - 4096
        both.io(name, f"write -P 201 {end} 4096")
        done = both.io(name, f"read -P 201 {end} 4096")
        r.require("verification failed" not in done.stdout, f"{of}: {done.stdout}")
        r.require(both.same_check(name, of) == 0, f"{of}: not clean once filled")


def test_create_says_and_refuses_as_qemu_img_does(both):
    """`create` prints and refuses the same as qemu-img."""
    for arguments in (
        ["-f", "qcow2", "x", "1G"],
        ["-f", "qcow2", "-o", "cluster_size=4k,refcount_bits=8,lazy_refcounts=on", "x", "1M"],
        ["-f", "qcow2", "-o", "compression_type=zstd,extended_l2=on", "x", "1000"],
        ["-f", "raw", "x", "1M"],
        ["x", "1.5K"],
    ):
        mine, their = (run("create", *arguments).stdout for run in (both.ours, both.theirs))
        r.require(sorted(mine.split()) == sorted(their.split()), f"{mine} is not {their}")
        both.same_info("x")
    for arguments, words in (
        (["-f", "qcow2", "y"], ["size"]),
        (["-f", "qcow2", "-o", "cluster_size=1000", "y", "1M"], ["cluster_size"]),
        (["-f", "qcow2", "-o", "colour=red", "y", "1M"], ["colour"]),
        (["-f", "qcow2", "-b", "missing", "-F", "raw", "y"], ["missing"]),
        (["-f", "qcow2", "-b", "x", "y"], ["-F"]),
        (["-f", "qcow2", "-o", "compat=0.10,extended_l2=on", "y", "1M"], ["extended_l2", "compat"]),
        (["-f", "qcow2", "-o", "cluster_size=512", "y", "1T"], ["cluster_size", "larger"]),
        (["-f", "raw", "-o", "cluster_size=512", "y", "1M"], ["raw"]),
    ):
        r.message_of(both.ours("create", *arguments, check=False), *words)
        r.require(not (both.dir / "y").exists(), f"{arguments} left a file behind")
    both.ours("create", "-q", "-f", "qcow2", "-b", "missing", "-F", "raw", "-u", "y", "1M")
    both.same_info("y")


def test_a_chain_is_described(both):
    """A chain of images, described by both."""
    both.theirs("create", "-q", "-f", "raw", "c0", "1M")
    both.ours("create", "-q", "-f", "qcow2", "-b", "c0", "-F", "raw", "c1")
    both.ours("create", "-q", "-f", "qcow2", "-b", "c1", "-F", "qcow2", "c2", "2M")
    mine, their = (
        json.loads(run("info", "--backing-chain", "--output=json", "c2").stdout) for run in (both.ours, both.theirs)
    )
    for my_one, one in zip(mine, their, strict=True):
        same_children(my_one, one)
        # Of raw files newer ones say more.
        if one["format"] == "raw":
            one.pop("format-specific", None)
    r.require(mine == their, f"{mine} is not {their}")
    both.ours("create", "-q", "-u", "-f", "qcow2", "-b", "loop", "-F", "qcow2", "loop", "1M")
    r.message_of(both.ours("info", "--backing-chain", "loop", check=False), "below itself")


def test_the_file_of_an_image_is_a_child(both):
    """With the fields of QEMU 11.1, whichever version is installed."""
    (both.dir / "odd.raw").write_bytes(bytes(1000001))
    both.ours("create", "-q", "-f", "qcow2", "-o", "data_file=far.data", "far", "1M")
    for name, size in (("odd.raw", 1000448), ("far", os.stat(both.dir / "far").st_size)):
        found = json.loads(both.ours("info", "--output=json", name).stdout)
        r.require(found["children"] == [{"name": "file", "info": {
            "children": [],
            "filename": name,
            "format": "file",
            "virtual-size": size,
            "actual-size": found["actual-size"],
            "dirty-flag": False,
            "format-specific": {"type": "file", "data": {}},
        }}], f"{found}")


def test_an_image_in_use_is_refused(both):
    """An image that QEMU has open for writing."""
    commands = (["info", "used0"], ["check", "-r", "all", "used1"], ["create", "-f", "qcow2", "used2", "1M"])
    users = []
    for n in range(len(commands)):
        both.theirs("create", "-q", "-f", "qcow2", f"used{n}", "1M")
        argv = [both.qemu_io, "-f", "qcow2", "-c", "write 0 64k", "-c", "sleep 60000", both.dir / f"used{n}"]
        users.append(r.Child(both.rig, f"qemu-io{n}", argv))
    for n in range(len(commands)):
        both.wait_for_lock(f"used{n}")
    # Each waits for the lock for some seconds.
    with ThreadPoolExecutor(len(commands)) as side_by_side:
        refused = list(side_by_side.map(lambda command: both.ours(*command, check=False), commands))
    for n, (command, done) in enumerate(zip(commands, refused)):
        r.message_of(done, "in use", f"used{n}")
        waits, ends = done.stderr.splitlines()
        r.require("waiting up to 5 s" in waits, f"{command} is silent while it waits: {waits}")
        r.require("(qemu-io, pid " in waits and "(qemu-io, pid " in ends, f"the user of the image is not named: {done.stderr}")
        r.require(not done.stdout, f"{command} prints before it is refused: {done.stdout}")
        both.ours("info", "-U", f"used{n}")
        users[n].kill()
        r.require(both.same_check(f"used{n}") in (0, 3), "corrupt")


def test_damage_that_no_check_repairs_has_another_remedy(both):
    """An L1 table at an odd offset. The check refuses it, so no message sends the user there."""
    both.ours("create", "-q", "-f", "qcow2", "damaged", "1M")
    with open(both.dir / "damaged", "r+b") as f:
        f.seek(40)
        f.write(struct.pack(">Q", 0x1001))
    disk = f"name=d0,format=qcow2,file={both.dir / 'damaged'}"
    serve = [r.binary("vshunt"), "serve", "--no-control", "--disk", disk, "--export", f"type=vhost-user-blk,disk=d0,socket={both.dir / 's'}"]
    for done in (
        both.ours("check", "-r", "all", "damaged", check=False),
        both.ours("info", "damaged", check=False),
        r.run(serve, check=False),
    ):
        r.message_of(done, "damaged", "cannot repair that: take the image from a backup", code=(1, 2))
        r.require("-r all" not in done.stderr, f"it sends the user to the check: {done.stderr}")


def test_a_killed_create_leaves_a_correct_image(both):
    """The space comes after the image: a kill while it is written leaves an image that lacks only space."""
    path = both.dir / "killed"
    argv = [r.binary("vshunt"), "image", "create", "-q", "-f", "qcow2", "-o", "preallocation=full", path, "512M"]
    child = r.Child(both.rig, "create", argv)
    r.wait_for("it writes", lambda: path.exists() and path.stat().st_blocks * 512 > 16 << 20)
    child.kill()
    r.require(both.same_check("killed") == 0, "the image is not correct")
    info = json.loads(both.ours("info", "--output=json", "killed").stdout)
    r.require(info["virtual-size"] == 512 << 20, f"its disk has {info['virtual-size']} bytes")
    path.unlink()


def filled(both, rand, name):
    """An image with some of everything, without a data file; its options."""
    while True:
        options, size = options_of(rand)
        if "data_file" not in options and options["cluster_size"] <= 1 << 16 and options.get("refcount_bits", 16) > 2:
            break
    options.pop("preallocation", None)
    both.theirs("create", "-q", "-f", "qcow2", "-o", text_of(options, name), name, size)
    both.io(name, *commands_of(rand, options, size, 12))
    if rand.random() < 0.5:
        both.theirs("snapshot", "-c", "one", name)
        both.io(name, *commands_of(rand, options, size, 4, new=False))
    return options


def tables_of(data):
    """The positions of the L1 table, an L2 table and the refcount blocks.

    The tests flip bytes there.
    """
    bits, _, _, l1_size, l1, reftable, reftable_clusters = struct.unpack_from(">IQIIQQI", data, 20)
    cluster = 1 << bits
    ranges = [(l1, l1_size * 8)]
    for n in range(l1_size):
        at = struct.unpack_from(">Q", data, l1 + 8 * n)[0] & 0x00FFFFFFFFFFFE00
        if at:
            ranges.append((at, cluster))
    for n in range(reftable_clusters * cluster // 8):
        at = struct.unpack_from(">Q", data, reftable + 8 * n)[0]
        if at:
            ranges.append((at, cluster))
            ranges.append((reftable + 8 * n, 8))
    return ranges


def test_corrupted_images_are_found_and_repaired(both, rand):
    """Bytes flipped in tables: what QEMU finds we find, and once we have repaired, QEMU finds nothing."""
    found = 0
    for n in range(CORRUPTIONS):
        name = f"bad{n}"
        options = filled(both, rand, name)
        data = bytearray((both.dir / name).read_bytes())
        flips = []
        for _ in range(rand.choice([1, 1, 2, 5])):
            start, length = rand.choice(tables_of(data))
            # Near the start, where tables have entries.
            at = start + rand.randrange(min(length, rand.choice([16, 64, 512])))
            bit = 1 << rand.randrange(8)
            flips.append((at, bit))
        for at, bit in flips:
            if at < len(data):
                data[at] ^= bit
        (both.dir / name).write_bytes(data)
        of = f"{n} of seed {SEED}: {options} with {[(hex(a), b) for a, b in flips]}"
        their, mine = (run("check", name, check=False) for run in (both.theirs, both.ours))
        if their.returncode in (1, 2):
            found += 1
            r.require(mine.returncode in (1, 2), f"{of}: only qemu-img finds it: {their.stderr[:400]}")
        elif their.returncode == 3:
            r.require(mine.returncode in (2, 3), f"{of}: leaks that only qemu-img finds: {their.stderr[:400]}")
        r.require(mine.returncode in (0, 1, 2, 3) and "panicked" not in mine.stderr, f"{of}: {mine.stderr}")
        done = both.ours("check", "-r", "all", name, check=False)
        if done.returncode == 1 and "the image is corrupt" in done.stderr:
            continue  # its header or L1 table is not where it can be: said so, nothing to repair
        r.require(done.returncode == 0, f"{of}: not repaired: {done.stdout}{done.stderr[:800]}")
        both.clean(name, f"{of}, repaired")
    r.require(found >= CORRUPTIONS // 4, f"only {found} of {CORRUPTIONS} images were corrupt: the test tests little")


def test_a_dirty_image_is_repaired(both):
    """An image whose counts were to be written later, and whose writer died."""
    both.ours("create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", "lazy", "4M")
    both.io("lazy", "write -P 5 0 1M", "abort", check=False)
    info = json.loads(both.ours("info", "--output=json", "lazy").stdout)
    r.require(info["dirty-flag"], f"not dirty: {info}")
    both.same_info("lazy")
    done = both.ours("check", "lazy", check=False)
    r.require(done.returncode == 2, f"ended with {done.returncode}: {done.stdout}")
    done = both.ours("check", "-r", "all", "lazy")
    r.require("repaired" in done.stdout, done.stdout)
    both.clean("lazy")
    info = json.loads(both.ours("info", "--output=json", "lazy").stdout)
    r.require(not info["dirty-flag"], f"still dirty: {info}")
    r.require("failed" not in both.io("lazy", "read -P 5 0 1M").stdout, "the data is not there")


def test_leaks_are_found_and_repaired(both):
    """Clusters that are counted and that nothing refers to."""
    both.theirs("create", "-q", "-f", "qcow2", "leak", "4M")
    both.io("leak", "write 0 1M")
    data = bytearray((both.dir / "leak").read_bytes())
    data[0x20000 + 2 * 40 : 0x20000 + 2 * 43] = b"\0\1" * 3
    (both.dir / "leak").write_bytes(data.ljust(4 << 20, b"\0"))
    r.require(both.same_check("leak") == 3, "no leaks")
    done = both.ours("check", "-r", "leaks", "--output=json", "leak")
    r.require(json.loads(done.stdout)["leaks-fixed"] == 3, done.stdout)
    both.clean("leak")


def test_hostile_images_end_in_time(both, rand):
    """Images that no program makes: an answer in time, and no more memory than they are worth."""

    def header(**fields):
        h = bytearray(104)
        values = {"magic": 0x514649FB, "version": 3, "bits": 9, "size": 1 << 20, "l1_size": 32, "l1": 0x400, "ref": 0x200, "refs": 1}
        values |= fields
        struct.pack_into(">II", h, 0, values["magic"], values["version"])
        struct.pack_into(">IQ", h, 20, values["bits"], values["size"])
        struct.pack_into(">IQQII", h, 36, values["l1_size"], values["l1"], values["ref"], values["refs"], values.get("snapshots", 0))
        struct.pack_into(">Q", h, 64, values.get("snapshots_at", 0))
        struct.pack_into(">II", h, 96, 4, 104)
        return bytes(h)

    def image(name, *parts, length=None):
        with open(both.dir / name, "wb") as f:
            for at, data in parts:
                f.seek(at)
                f.write(data)
            f.truncate(length or 1 << 20)
        return name

    def entries(*numbers):
        return struct.pack(f">{len(numbers)}Q", *numbers)

    many = 1 << 20
    ones = b"\xff" * 512
    cases = [
        image("h-loop", (0, header()), (0x200, entries(0x200)), (0x400, entries(*[0x400] * 32))),
        image("h-self", (0, header()), (0x200, entries(0x600)), (0x400, entries(0x800)), (0x800, entries(*[0x800] * 64))),
        image("h-same", (0, header(bits=16, size=1 << 51, l1_size=many, l1=1 << 20, ref=1 << 16)), (1 << 16, entries(1 << 17)),
              (1 << 20, entries(*[1 << 26]) * many), (1 << 26, entries(*range(1 << 16, 1 << 29, 1 << 16))), length=1 << 27),
        image("h-sparse", (0, header(bits=21, size=1 << 60, l1_size=many, l1=1 << 25, ref=1 << 21)), (1 << 21, entries(1 << 22)),
              (1 << 25, b"".join(entries((1 << 27) + (n << 21)) for n in range(many))), length=1 << 42),
        image("h-refs", (0, header(refs=1 << 14)), (0x200, entries(*(0x400000 + 512 * n for n in range(1 << 14)))), length=1 << 25),
        image("h-huge", (0, header()), (0x200, ones), (0x400, ones), (0x600, ones), length=1 << 43),
        image("h-snap", (0, header(snapshots=65536, snapshots_at=0x1000)), (0x200, entries(0x600)), length=1 << 24),
        image("h-short", (0, header()[:50]), length=50),
        image("h-ones", (0, header()), (0x200, b"\xff" * 100000)),
        image("h-name", (0, header()[:8] + struct.pack(">QI", 1 << 63, 1 << 31) + header()[20:])),
    ]
    for n in range(10):
        cases.append(image(f"h-random{n}", (0, header()), (0x200, rand.randbytes(1 << 16))))
    for name in cases:
        for command in (["info"], ["check"], ["check", "-r", "all"], ["check", "-r", "leaks"]):
            argv = ["prlimit", f"--as={3 << 30}", r.binary("vshunt"), "image", *command, both.dir / name]
            done = r.run(argv, timeout_s=HANG_S, check=False)
            r.require(done.returncode in (0, 1, 2, 3), f"{name}: {command} ended with {done.returncode}: {done.stderr[-600:]}")
            r.require("panicked" not in done.stderr and "memory" not in done.stderr, f"{name}: {command}: {done.stderr[-600:]}")
    for name in cases:
        (both.dir / name).unlink()
