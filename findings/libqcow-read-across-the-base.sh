#!/bin/sh
# libqcow 20201213: a read that begins in a cluster of the base takes the whole range from the base.
#
# Expected: each cluster of a read comes from the overlay if the overlay has it, else from the base.
# Seen with libqcow 20201213 (Debian 12): the first cluster decides for the whole read. Data of the
# overlay are missing in a read that begins before them, without an error, and are there in a read
# that begins with them. Without a base, and with 20260703, the read is right. Read cluster by
# cluster.
#
# Output:
#     libqcow 20201213: one read: BBBB, four reads: BOOB
#
# Needs Debian 12 (apt-get, dpkg, Python 3.11) and qemu-img. Fails if the data differ.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq -o APT::Sandbox::User=root download python3-libqcow=20201213-1+b2 libqcow1=20201213-1+b2
for package in *.deb; do
    dpkg -x "$package" "$dir/old"
done
head -c 256K /dev/zero | tr '\0' B >base
qemu-img convert -f raw -O qcow2 base base.qcow2
qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
qemu-io -c 'write -q -P 79 64k 128k' overlay.qcow2
lib=$dir/old/usr/lib
LD_LIBRARY_PATH=$(echo "$lib"/*-linux-gnu) PYTHONPATH=$lib/python3/dist-packages python3 - <<'PY'
import sys

import pyqcow

CLUSTER = 65536
base, overlay = pyqcow.file(), pyqcow.file()
base.open("base.qcow2")
overlay.open("overlay.qcow2")
overlay.set_parent(base)
data = overlay.read(4 * CLUSTER)
one = "".join(chr(data[i * CLUSTER]) for i in range(4))
four = ""
for i in range(4):
    overlay.seek(i * CLUSTER)
    four += chr(overlay.read(CLUSTER)[0])
print(f"libqcow {pyqcow.get_version()}: one read: {one}, four reads: {four}")
sys.exit((one, four) != ("BBBB", "BOOB"))
PY
