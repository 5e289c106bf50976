#!/bin/sh
# libqcow: a qcow2 cluster that is marked "reads as zeroes" gives other data.
#
# Expected: zeroes, or an error for the flag that the reader does not know. Seen, without an error:
#
# | version | the cluster has an offset | it has none |
# | --- | --- | --- |
# | 20201213 (Debian 12) | the old data at that offset | the start of the image file |
# | 20260703 (libqcow-python) | the data of the base | the data of the base |
#
# Such clusters are common: QEMU makes them for write zeroes, and for discard over a base.
#
# Output:
#     libqcow 20201213: offset kept: b'OOOO', no offset: b'QFI\xfb'
#     libqcow 20260703: offset kept: b'BBBB', no offset: b'BBBB'
#
# Needs Debian 12 (apt-get, dpkg), Python 3.11 with pip, and qemu-img. Fails if the data differ.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --only-binary :all: --no-deps \
    --target "$dir/new" libqcow-python==20260703
apt-get -qq -o APT::Sandbox::User=root download python3-libqcow=20201213-1+b2 libqcow1=20201213-1+b2
for package in *.deb; do
    dpkg -x "$package" "$dir/old"
done
head -c 256K /dev/zero | tr '\0' B >base
qemu-img convert -f raw -O qcow2 base base.qcow2
qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 overlay.qcow2
qemu-io -c 'write -q -P 79 0 64k' -c 'write -q -z 0 128k' overlay.qcow2
qemu-io -c 'read -q -P 0 0 128k' overlay.qcow2
cat >read.py <<'PY'
import sys

import pyqcow

base, overlay = pyqcow.file(), pyqcow.file()
base.open("base.qcow2")
overlay.open("overlay.qcow2")
overlay.set_parent(base)
kept = overlay.read(65536)[:4]
overlay.seek(65536)
none = overlay.read(65536)[:4]
print(f"libqcow {pyqcow.get_version()}: offset kept: {kept}, no offset: {none}")
sys.exit([kept, none] != [bytes.fromhex(value) for value in sys.argv[1:]])
PY
lib=$dir/old/usr/lib
LD_LIBRARY_PATH=$(echo "$lib"/*-linux-gnu) PYTHONPATH=$lib/python3/dist-packages python3 read.py 4f4f4f4f 514649fb
PYTHONPATH=$dir/new python3 read.py 42424242 42424242
