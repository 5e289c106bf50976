#!/bin/sh
# 7-Zip 26.02: a compressed qcow2 with extended L2 entries comes out wrong, "Everything is Ok".
#
# Expected: a format that is not supported is refused, as 7-Zip refuses extended L2 entries whose
# clusters are not compressed. Seen with 7-Zip 26.02 (7zip of Debian 12): with compressed clusters
# the entries of 16 bytes are read as entries of 8. Cluster i comes out at 2 i, between them zeroes,
# and the second half of the disk is missing. The listing has "incompatible: Extended_L2", but the
# exit code is 0.
#
# Output:
#     7-Zip (z) 26.02 (x64)
#     compressed: exit code 0, Everything is Ok, ABCDEFGH reads A.B.C.D.
#     not compressed: exit code 2
#
# Needs Debian 12 (apt-get, dpkg), qemu-img and Python 3. Fails if the data or an exit code differ.
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
apt-get -qq -o APT::Sandbox::User=root download 7zip=22.01+really26.02+dfsg-0+deb12u1
dpkg -x 7zip_*.deb "$dir/root"
zip=$dir/root/usr/bin/7zz
"$zip" | sed -n 's/^\(7-Zip .*)\) : .*/\1/p'
python3 -c 'import sys; sys.stdout.write("".join(c * 65536 for c in "ABCDEFGH"))' >disk.raw
qemu-img convert -c -f raw -O qcow2 -o extended_l2=on disk.raw compressed.qcow2
qemu-img convert -f raw -O qcow2 -o extended_l2=on disk.raw plain.qcow2
qemu-img compare -q disk.raw compressed.qcow2

code=0
"$zip" x -y compressed.qcow2 >log || code=$?
message=$(grep Everything log || true)
found=$(python3 -c 'print("".join(chr(c or ord(".")) for c in open("compressed.img", "rb").read()[::65536]))')
echo "compressed: exit code $code, $message, ABCDEFGH reads $found"
plain=0
"$zip" x -y plain.qcow2 >log 2>&1 || plain=$?
echo "not compressed: exit code $plain"
[ "$code $message $found $plain" = "0 Everything is Ok A.B.C.D. 2" ]
