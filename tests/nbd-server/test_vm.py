"""The kernel's own NBD client, in a VM with a stock kernel: `nbd-client` connects it to an export of a
daemon in the VM. The kernel sends what its block layer and ext4 ask for: reads, writes, flushes, FUA,
trims and WriteZeroes, with simple replies, by several connections."""

import os

import kernel_vm as k
import pytest
import rig as r

pytestmark = [pytest.mark.timeout(900), pytest.mark.vm, pytest.mark.kernel, pytest.mark.slow]

CONNECTIONS = 4

JOB = f"""
need nbd
ip link set lo up
vshunt serve --control /tmp/ctl --disk name=d0,format=ram,size=64M \\
    --export type=nbd,name=n0,disk=d0,listen=unix:/tmp/n0.nbd,writable=on,workers=2 \\
    --export type=nbd,name=n1,disk=d0,listen=127.0.0.1:10809 2>/tmp/log &
daemon=$!
n=0
while ! vshunt -c /tmp/ctl status >/tmp/status 2>&1 && kill -0 $daemon && [ $n -lt 900 ]; do sleep 0.1; n=$((n + 1)); done
cat /tmp/status /tmp/log

# connected NUMBER: so many queues have a client.
connected() {{
    n=$(vshunt -c /tmp/ctl status n0 n1 | grep -c ' running ')
    [ "$n" -eq $1 ] || {{ echo "$n queues run"; vshunt -c /tmp/ctl status n0 n1; return 1; }}
}}
result "kernel client: connects" nbd-client -unix /tmp/n0.nbd /dev/nbd0 -N n0 -b 4096 -C {CONNECTIONS}
result "kernel client: each of its connections is a queue" connected {CONNECTIONS}
result "kernel client: the size of the disk" sh -c "blockdev --getsize64 /dev/nbd0 | grep -x 67108864"
result "kernel client: a file system" sh -c "mke2fs -b 4096 /dev/nbd0 >/dev/null && mount -t ext4 -o discard /dev/nbd0 /mnt"
dd if=/dev/urandom of=/tmp/data bs=1M count=20 2>/dev/null

# moves TIMES: all queues, to the other worker.
moves() {{
    n=0
    while [ $n -lt $1 ]; do
        vshunt -c /tmp/ctl attach n0 $((n % 2)) || return 1
        n=$((n + 1))
    done
}}
(for name in a b; do cp /tmp/data /mnt/$name && sync; done; echo done) >/tmp/copied 2>&1 &
copies=$!
result "kernel client: queues move" moves 12
wait $copies
result "kernel client: copies end" grep -x done /tmp/copied
umount /mnt
echo 3 >/proc/sys/vm/drop_caches
mount -t ext4 -o discard /dev/nbd0 /mnt
result "kernel client: the first copy" cmp /tmp/data /mnt/a
result "kernel client: the second copy" cmp /tmp/data /mnt/b
result "kernel client: trims" sh -c "rm /mnt/a && sync && fstrim -v /mnt"
result "kernel client: what is left" cmp /tmp/data /mnt/b
umount /mnt
result "kernel client: another one, by TCP, read-only" nbd-client 127.0.0.1 10809 /dev/nbd1 -N n1 -b 4096
result "kernel client: it knows" sh -c "blockdev --getro /dev/nbd1 | grep -x 1"
result "kernel client: and sees the same" cmp /dev/nbd0 /dev/nbd1
result "kernel client: disconnects" sh -c "nbd-client -d /dev/nbd0 && nbd-client -d /dev/nbd1"
gone() {{
    tries=0
    while ! connected 0 >/dev/null && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
    connected 0
}}
result "kernel client: no queue is left" gone
result "kernel client: the daemon has written to its log only what is expected" sh -c "! grep -i 'error\\|panic' /tmp/log"

# A server that is killed: the device fails requests, and the kernel continues.
nbd-client -unix /tmp/n0.nbd /dev/nbd0 -N n0 -b 4096 -C {CONNECTIONS}
kill -9 $daemon
wait $daemon
result "kernel client: reads fail after a kill" fails "error" dd if=/dev/nbd0 of=/dev/null bs=4096 count=1 skip=9000
nbd-client -d /dev/nbd0 >/dev/null 2>&1
"""


def test_the_kernels_client(rig, record):
    client = r.tool("nbd-client", "nbd-client")
    folder = k.kernel("fetch")
    modules = k.Modules(folder)
    r.require(modules.add("nbd"), "the kernel has no module nbd")
    programs = {"vshunt": r.binary("vshunt"), "nbd-client": client}
    base = k.Base(rig, folder, modules, {}, k.with_libraries(programs))
    k.Vm(rig, base, "nbd", JOB).finish(float(os.environ.get("NBD_S", "240")), record)
