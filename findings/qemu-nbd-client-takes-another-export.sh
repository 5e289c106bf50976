#!/bin/sh
# QEMU 7.2: the NBD client connects again to an export of another size, and writes to it.
#
# Expected: if the connection breaks and the server comes back with an export of another size, the
# disk is not the same one, and requests fail. Seen with QEMU 7.2 (Debian 12) and reconnect-delay:
# the new size is not compared. The length stays the old one, reads return the data of the other
# disk, and writes change it. Nothing is printed. A name of an export has to stay with one disk.
#
# Output:
#     first server, 1 MiB: length 1 MiB, reads A
#     other server, 4 MiB: length 1 MiB, reads B, write succeeds: the other disk begins with CCCC
#
# Needs Debian 12 (apt-get, dpkg, the libraries of qemu-utils and qemu-system-common). Fails if the
# client refuses the other disk.
set -eu
dir=$(mktemp -d)
server=
client=
stop() {
    [ -n "$1" ] || return 0
    kill "$1" || return 0
    while [ -e "/proc/$1/exe" ]; do sleep 0.1; done
}
trap 'stop "$client"; stop "$server"; rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
cd "$dir"
apt-get -qq -o APT::Sandbox::User=root download qemu-utils=1:7.2+dfsg-7+deb12u18+b3 qemu-system-common=1:7.2+dfsg-7+deb12u18+b3
for package in *.deb; do
    dpkg -x "$package" "$dir/root"
done
export PATH="$dir/root/usr/bin:$PATH"
head -c 1M /dev/zero | tr '\0' A >one
head -c 4M /dev/zero | tr '\0' B >other

serve() {
    qemu-nbd --fork --pid-file="$dir/server" --persistent -f raw -x disk -k "$dir/socket" "$1"
    server=$(cat server)
}
serve one
qemu-storage-daemon --daemonize --pidfile "$dir/client" --nbd-server "addr.type=unix,addr.path=$dir/export" \
    --blockdev "driver=nbd,node-name=disk,server.type=unix,server.path=$dir/socket,export=disk,reconnect-delay=60" \
    --export type=nbd,id=disk,node-name=disk,name=disk,writable=on
client=$(cat client)
uri="nbd+unix:///disk?socket=$dir/export"
length=$(qemu-io -r -f raw -c length "$uri")
qemu-io -f raw -c 'read -q -P 65 0 64k' "$uri"
echo "first server, 1 MiB: length $length, reads A"

stop "$server"
serve other
qemu-io -f raw -c 'read -q -P 66 0 64k' -c 'write -q -P 67 0 64k' "$uri"
length=$(qemu-io -r -f raw -c length "$uri")
begin=$(head -c 4 other)
echo "other server, 4 MiB: length $length, reads B, write succeeds: the other disk begins with $begin"
[ "$length $begin" = "1 MiB CCCC" ]
