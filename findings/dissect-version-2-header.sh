#!/bin/sh
# dissect.hypervisor 3.21: a version 2 qcow2 over a qcow2 base is taken for one with a data file.
#
# Expected: the header of version 2 (compat=0.10) ends at byte 72. Feature bits, header length and
# compression type exist in version 3 only. Seen with dissect.hypervisor 3.21: they are read in both
# versions. In an overlay of version 2 that QEMU made, bytes 72 to 79 are the type and the length of
# the extension "backing file format name". For "qcow2" the length is 5, and bit 2 of it is the
# feature bit "external data file". The reader then looks for the name of that file. For "raw" (3)
# that bit is not set, and the image opens. The older version is not the safer one for exchange.
#
# Output:
#     compat=0.10 over raw: right
#     compat=0.10 over qcow2: ValueError: Invalid name None
#     compat=1.1 over raw: right
#     compat=1.1 over qcow2: right
#
# Needs Python 3.9 or later with pip, and qemu-img. Fails if one of the four ends otherwise.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$dir/py" dissect.hypervisor==3.21 dissect.cstruct==4.7 dissect.util==3.24 defusedxml==0.7.1
PYTHONPATH=$dir/py python3 - <<'PY'
import subprocess
import sys
from pathlib import Path

from dissect.hypervisor.disk.qcow2 import QCow2

SIZE, CLUSTER = 1 << 20, 65536
Path("base.raw").write_bytes(b"B" * SIZE)
subprocess.check_call("qemu-img convert -f raw -O qcow2 base.raw base.qcow2", shell=True)
results = []
for compat in "0.10", "1.1":
    for base in "raw", "qcow2":
        image = f"{compat}-{base}.qcow2"
        subprocess.check_call(f"qemu-img create -q -f qcow2 -o compat={compat} -b base.{base} -F {base} {image}", shell=True)
        subprocess.check_call(["qemu-io", "-c", "write -q -P 79 64k 64k", image])
        try:
            data = QCow2(Path(image)).open().read(SIZE)
            result = "right" if data == b"B" * CLUSTER + b"O" * CLUSTER + b"B" * (SIZE - 2 * CLUSTER) else "wrong data"
        except ValueError as error:
            result = f"ValueError: {error}"
        print(f"compat={compat} over {base}: {result}")
        results.append(result)
sys.exit(results != ["right", "ValueError: Invalid name None", "right", "right"])
PY
