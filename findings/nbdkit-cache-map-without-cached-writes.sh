#!/bin/sh
# nbdkit 1.32: behind the cache filter, block status says "hole" for data that were written.
#
# Expected: what a client has written is mapped as data, flushed or not, since reads return it. Seen
# with nbdkit 1.32.5 (Debian 12): writes stay in the cache, and block status comes from the plugin
# below. A copy that asks for block status skips these data: nbdcopy and qemu-img write zeroes, and
# the exit code is 0. nbdcopy flushes only with --flush, so two copies in a row can lose all. After
# a flush the map is right.
#
# Output:
#     nbdkit 1.32.5
#     before a flush: map hole,zero, a read gives N, the copy has zeroes
#     after a flush: map data, a read gives N, the copy has N
#
# Needs Debian 12 (apt-get, dpkg) and qemu-io. Fails if a map or a copy differs.
set -eu
dir=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || true; rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
cd "$dir"
apt-get -qq -o APT::Sandbox::User=root download nbdkit=1.32.5-1 libnbd-bin=1.14.2-1 libnbd0=1.14.2-1
for package in *.deb; do
    dpkg -x "$package" "$dir/root"
done
LD_LIBRARY_PATH=$(echo "$dir"/root/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH
nbdkit=$LD_LIBRARY_PATH/nbdkit
export PATH="$dir/root/usr/bin:$PATH"

nbdkit --version
nbdkit --foreground --unix "$dir/socket" --pidfile "$dir/pid" --filter="$nbdkit/filters/nbdkit-cache-filter.so" \
    "$nbdkit/plugins/nbdkit-memory-plugin.so" 1M &
server=$!
while ! [ -s pid ]; do
    kill -0 "$server"
    sleep 0.1
done
uri="nbd+unix:///?socket=$dir/socket"
head -c 1M /dev/zero | tr '\0' N >written
head -c 1M /dev/zero >zeroes

# Prints the map, the data read, and the data copied.
seen() {
    map=$(nbdinfo --map "$uri" | awk '{ print $4 }')
    qemu-io -r -f raw -c 'read -q -P 78 0 1M' "$uri"
    nbdcopy "$uri" copy
    if cmp -s copy zeroes; then copied=zeroes; elif cmp -s copy written; then copied=N; else copied=other; fi
    echo "map $map, a read gives N, the copy has $copied"
}
nbdcopy written "$uri"
before=$(seen)
echo "before a flush: $before"
qemu-io -f raw -c flush "$uri"
after=$(seen)
echo "after a flush: $after"
[ "$before" = "map hole,zero, a read gives N, the copy has zeroes" ]
[ "$after" = "map data, a read gives N, the copy has N" ]
