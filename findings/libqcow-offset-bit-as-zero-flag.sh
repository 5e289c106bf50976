#!/bin/sh
# libqcow 20260703: compressed clusters of qcow2 that begin at an odd offset read as zeroes.
#
# Expected: bits 0 to 53 of a compressed cluster's L2 entry (clusters of 64 KiB) are its offset in
# the file. The flag "reads as zeroes", bit 0, is there for other clusters only. Seen with
# libqcow-python 20260703: bit 0 counts as that flag here too. A compressed cluster at an odd offset
# reads as zeroes, without an error. QEMU packs compressed clusters byte by byte, so about half of
# them are lost. With clusters that each begin at a sector all is right. libqcow 20201213 of
# Debian 12 reads them right.
#
# Output:
#     libqcow 20260703, 64 compressed clusters
#     at even offsets: 30 right, 0 as zeroes
#     at odd offsets: 0 right, 34 as zeroes
#
# Needs Python 3.11 with pip, and qemu-img. Fails if a cluster reads otherwise.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --only-binary :all: --no-deps \
    --target "$dir/py" libqcow-python==20260703
cd "$dir"
PYTHONPATH=$dir/py python3 - <<'PY'
import random
import struct
import subprocess
import sys

import pyqcow

CLUSTER, COUNT = 65536, 64
values = random.Random(1)
disk = b"".join(values.randbytes(512 * (i + 1)) + b"x" * (CLUSTER - 512 * (i + 1)) for i in range(COUNT))
with open("disk.raw", "wb") as f:
    f.write(disk)
subprocess.check_call(["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "disk.raw", "disk.qcow2"])
with open("disk.qcow2", "rb") as f:
    image = f.read()
l1_table = struct.unpack_from(">Q", image, 40)[0]
l2_table = struct.unpack_from(">Q", image, l1_table)[0] & 0x00FFFFFFFFFFFE00

counts = {}
stream = pyqcow.file()
stream.open("disk.qcow2")
compressed = 0
for i in range(COUNT):
    entry = struct.unpack_from(">Q", image, l2_table + 8 * i)[0]
    if not entry >> 62 & 1:
        continue
    compressed += 1
    stream.seek(i * CLUSTER)
    data = stream.read(CLUSTER)
    result = "right" if data == disk[i * CLUSTER : (i + 1) * CLUSTER] else "zeroes" if not any(data) else "other"
    counts[entry & 1, result] = counts.get((entry & 1, result), 0) + 1
print(f"libqcow {pyqcow.get_version()}, {compressed} compressed clusters")
for odd, name in enumerate(("even", "odd")):
    print(f"at {name} offsets: {counts.get((odd, 'right'), 0)} right, {counts.get((odd, 'zeroes'), 0)} as zeroes")
sys.exit(set(counts) != {(0, "right"), (1, "zeroes")})
PY
