"""Unpacks the deflate clusters of a qcow2 image with QEMU's window of 4 KiB, in pieces."""

import random
import struct
import zlib

# log2 of the window, as QEMU opens clusters. Negative: there is no header of zlib.
WINDOW_BITS = -12
OFFSET = (1 << 56) - (1 << 9)
COMPRESSED = 1 << 62
EXTENDED_L2 = 1 << 4


def streamed(data):
    """Unpacks a cluster as a program does that reads a stream: between two pieces it remembers the last 4 KiB only."""
    stream, out = zlib.decompressobj(WINDOW_BITS), []
    while data and not stream.eof:
        out.append(stream.decompress(data, 256))
        data = stream.unconsumed_tail
    return b"".join(out)


def clusters(path):
    """Yields the number, the place in the file and the contents of each compressed cluster. zlib.error: a distance is larger than the window."""
    with open(path, "rb") as f:
        header = f.read(104)
        (bits,), (entries,), (l1,) = (struct.unpack(form, header[at:end]) for form, at, end in ((">I", 20, 24), (">I", 36, 40), (">Q", 40, 48)))
        version, incompatible = struct.unpack(">I", header[4:8])[0], struct.unpack(">Q", header[72:80])[0]
        step = 2 if version >= 3 and incompatible & EXTENDED_L2 else 1
        f.seek(l1)
        tables = struct.unpack(f">{entries}Q", f.read(8 * entries))
        per_table = (1 << bits) // 8 // step
        for n, table in enumerate(tables):
            if not table & OFFSET:
                continue
            f.seek(table & OFFSET)
            for k, entry in enumerate(struct.unpack(f">{per_table * step}Q", f.read(1 << bits))[::step]):
                if entry & COMPRESSED:
                    shift = 62 - (bits - 8)
                    at, sectors = entry & (1 << shift) - 1, (entry >> shift & (1 << bits - 8) - 1) + 1
                    f.seek(at)
                    yield n * per_table + k, at, streamed(f.read(sectors * 512 - at % 512))


def far_repetitions(size):
    """Contents that repeat themselves after 8 KiB, and have short runs of zeroes, so that each cluster becomes smaller."""
    rand = random.Random(1)
    block = b"".join(rand.randbytes(192) + bytes(64) for _ in range(32))
    return (block * (size // len(block) + 1))[:size]


def check(path, plain, at_sectors=True):
    """Checks each compressed cluster against the contents of the disk, and whether it begins with a sector, as those of vshunt. Returns
    how many there are. zlib.error: see `clusters`."""
    count = 0
    with open(path, "rb") as f:
        (bits,) = struct.unpack(">I", f.read(24)[20:])
    for number, at, found in clusters(path):
        if at_sectors and at % 512:
            raise ValueError(f"cluster {number} begins at {at}, within a sector")
        expected = plain[number << bits:number + 1 << bits]
        if found[:len(expected)] != expected or len(found) != 1 << bits or any(found[len(expected):]):
            raise ValueError(f"cluster {number} has other contents")
        count += 1
    return count
