#!/bin/sh
# dissect.hypervisor 3.21: a qcow2 overlay that is larger than its base reads too short and shifted.
#
# Expected: the part of an overlay behind the end of its base reads as zeroes, as the format says.
# Seen with dissect.hypervisor 3.21: a read beyond the end of the base adds nothing, and the next
# cluster of the overlay follows at once. Data come too early, and the disk is too short, without an
# error. A read that begins at the data of the overlay is right. A disk that was grown after its
# snapshot is such an overlay.
#
# Output:
#     disk of 2097152 bytes, base of 1048576 bytes, data at 1572864
#     read as a whole: 1114112 bytes, data at 1048576
#     read at 1572864: right
#
# Needs Python 3.9 or later with pip, and qemu-img. Fails if the lengths or offsets differ.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$dir/py" dissect.hypervisor==3.21 dissect.cstruct==4.7 dissect.util==3.24 defusedxml==0.7.1
head -c 1M /dev/zero | tr '\0' B >base.raw
qemu-img create -q -f qcow2 -b base.raw -F raw overlay.qcow2 2M
qemu-io -c 'write -q -P 79 1536k 64k' overlay.qcow2
PYTHONPATH=$dir/py python3 - <<'PY'
import sys
from pathlib import Path

from dissect.hypervisor.disk.qcow2 import QCow2

AT, CLUSTER = 1536 * 1024, 65536
image = QCow2(Path("overlay.qcow2"))
print(f"disk of {image.size} bytes, base of {Path('base.raw').stat().st_size} bytes, data at {AT}")
stream = image.open()
data = stream.read(image.size)
print(f"read as a whole: {len(data)} bytes, data at {data.find(b'O')}")
stream = image.open()
stream.seek(AT)
right = stream.read(CLUSTER) == b"O" * CLUSTER
print(f"read at {AT}: {'right' if right else 'wrong data'}")
sys.exit((len(data), data.find(b"O"), right) != (1114112, 1048576, True))
PY
