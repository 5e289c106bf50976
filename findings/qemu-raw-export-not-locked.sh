#!/bin/sh
# QEMU 7.2: the image lock does not keep a second writer from a raw image that qemu-nbd serves.
#
# Expected: QEMU's lock of an image refuses a second writer, as it does for qcow2. Seen with QEMU
# 7.2 (Debian 12): qemu-nbd and qemu-img both allow other writers of a raw image, and so does an NBD
# export of qemu-storage-daemon. qemu-img overwrites the disk while it is served, and the exit code
# is 0.
#
# Output:
#     raw: exit code 0, the export now has: B
#     qcow2: exit code 1, the export now has: A
#         Failed to get "write" lock
#
# Needs Debian 12 (apt-get, dpkg, the libraries of qemu-utils). Fails if an exit code differs.
set -eu
dir=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" || true; rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
cd "$dir"
apt-get -qq -o APT::Sandbox::User=root download qemu-utils=1:7.2+dfsg-7+deb12u18+b3
dpkg -x qemu-utils_*.deb "$dir/root"
export PATH="$dir/root/usr/bin:$PATH"
head -c 1M /dev/zero | tr '\0' A >a
head -c 1M /dev/zero | tr '\0' B >b
codes=
for format in raw qcow2; do
    qemu-img convert -f raw -O "$format" a "disk.$format"
    rm -f pid
    qemu-nbd --fork --pid-file="$dir/pid" --persistent -f "$format" -k "$dir/socket" "disk.$format"
    server=$(cat pid)
    code=0
    qemu-img convert -n -f raw -O "$format" b "disk.$format" 2>log || code=$?
    qemu-img convert -f raw -O raw "nbd+unix:///?socket=$dir/socket" now
    if cmp -s now a; then data=A; elif cmp -s now b; then data=B; else data=other; fi
    echo "$format: exit code $code, the export now has: $data"
    sed -n 's/.*\(Failed to get .*\)/    \1/p' log
    codes="$codes $code $data"
    kill "$server"
    server=
    while [ -e socket ]; do sleep 0.1; done
done
[ "$codes" = " 0 B 1 A" ]
