#!/bin/sh
# nbd-server 3.24: maxconnections counts all connections since the start, not those that are open.
#
# Expected: nbd-server(5) says that it limits "the number of opened connections for this export", so
# a client that has left makes room for the next. Seen with nbd-server 3.24 (Debian 12): the count
# never goes down. With maxconnections = 2 the third client is refused, though none is connected,
# and so is each later one until a restart. A client that connects again after each failure uses the
# number up.
#
# Output:
#     client 1: 1048576
#     client 2: 1048576
#     client 3: refused
#     client 4: refused
#
# Needs Debian 12 (apt-get, dpkg). Fails if other clients are refused.
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
head -c 1M /dev/zero >disk.raw
cat >config <<CONFIG
[generic]
unixsock = $dir/socket
[disk]
exportname = $dir/disk.raw
maxconnections = 2
CONFIG
"$dir/root/bin/nbd-server" -C "$dir/config" -p "$dir/pid"
while ! [ -s pid ] || ! [ -S socket ]; do sleep 0.1; done
results=
for client in 1 2 3 4; do
    result=$("$dir/root/usr/bin/nbdinfo" --size "nbd+unix:///disk?socket=$dir/socket" 2>>log) || result=refused
    # The process that serves a client ends after the client.
    server=$(cat pid)
    while [ -n "$(cat "/proc/$server/task/$server/children")" ]; do sleep 0.1; done
    echo "client $client: $result"
    results="$results $result"
done
[ "$results" = " 1048576 1048576 refused refused" ]
