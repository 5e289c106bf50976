#!/bin/sh
# nbd-server 3.24: NBD_OPT_INFO reports size 0 for an export that NBD_OPT_GO reports with its size.
#
# Expected: the answer to INFO has the size that GO will have. Seen with nbd-server 3.24 (Debian
# 12): INFO succeeds with size 0. A client that looks before it connects, as nbdinfo does, calls the
# export empty. Take the size from the answer to GO only.
#
# Output:
#     nbdinfo: export-size: 0
#     nbdinfo: content: empty
#     nbdinfo --size: 1048576
#
# Needs Debian 12 (apt-get, dpkg). Fails if a size differs.
set -eu
dir=$(mktemp -d)
trap '[ ! -s "$dir/pid" ] || kill "$(cat "$dir/pid")" || true; rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
cd "$dir"
apt-get -qq -o APT::Sandbox::User=root download nbd-server=1:3.24-1.1 libnbd-bin=1.14.2-1 libnbd0=1.14.2-1
for package in *.deb; do
    dpkg -x "$package" "$dir/root"
done
LD_LIBRARY_PATH=$(echo "$dir"/root/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH
head -c 1M /dev/zero | tr '\0' A >disk.raw
cat >config <<CONFIG
[generic]
unixsock = $dir/socket
[disk]
exportname = $dir/disk.raw
CONFIG
"$dir/root/bin/nbd-server" -C "$dir/config" -p "$dir/pid"
while ! [ -s pid ] || ! [ -S socket ]; do sleep 0.1; done
uri="nbd+unix:///disk?socket=$dir/socket"
"$dir/root/usr/bin/nbdinfo" "$uri" >info 2>log
info=$(sed -n 's/^\t\(export-size\|content\): /\1: /p' info)
echo "$info" | sed 's/^/nbdinfo: /'
size=$("$dir/root/usr/bin/nbdinfo" --size "$uri")
echo "nbdinfo --size: $size"
[ "$(echo "$info" | tr '\n' ',') $size" = "export-size: 0,content: empty, 1048576" ]
