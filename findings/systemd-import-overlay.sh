#!/bin/sh
# systemd 252: the import of a qcow2 overlay leaves out its base, and reports success.
#
# Expected: systemd-import (machinectl import-raw) follows the name of the base, or refuses an image
# that has one. Seen with systemd 252 (Debian 12): the header's fields for the base are not looked
# at. Clusters that only the base has become zeroes, and the exit code is 0. Give it a copy without
# a base (qemu-img convert).
#
# Output:
#     Operation completed successfully.
#     exit code 0, BOBB reads .O..
#
# Needs Debian 12 (apt-get, dpkg, systemd's libraries), qemu-img and Python 3. Fails if the data or
# the exit code differ.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq -o APT::Sandbox::User=root download systemd-container=252.39-1~deb12u2 libsystemd-shared=252.39-1~deb12u2
for package in *.deb; do
    dpkg -x "$package" "$dir/root"
done
head -c 256K /dev/zero | tr '\0' B >base.raw
qemu-img create -q -f qcow2 -b base.raw -F raw overlay.qcow2
qemu-io -c 'write -q -P 79 64k 64k' overlay.qcow2
mkdir images
code=0
LD_LIBRARY_PATH=$(echo "$dir"/root/usr/lib/*-linux-gnu/systemd) "$dir/root/lib/systemd/systemd-import" \
    --image-root="$dir/images" --sync=no raw overlay.qcow2 disk >log 2>&1 || code=$?
grep completed log
found=$(python3 -c 'print("".join(chr(c or ord(".")) for c in open("images/disk.raw", "rb").read()[::65536]))')
echo "exit code $code, BOBB reads $found"
[ "$code $found" = "0 .O.." ]
