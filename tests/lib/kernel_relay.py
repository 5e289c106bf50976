"""Shell jobs for the VMs of tests/kernel-relay: `vshunt serve … engine=kernel`."""

import itertools

COMMON = """
need brd rd_nr=2 rd_size=65536
need loop
need vhost_blk
C=/tmp/c
export VSHUNT_CONTROL=$C
up() { until vshunt status >/dev/null 2>&1; do sleep 0.1; done; }
# serve DISK-KEYS EXPORT-KEYS...
serve() {
    disk=$1; shift
    vshunt serve -q -c $C --disk name=d0,$disk --export type=vhost-user-blk,name=e0,disk=d0,socket=/tmp/s,$1 >/tmp/serve 2>&1 &
    pid=$!
    up
}
# A result runs in a shell of its own, whose children are others.
quit() { vshunt quit --force "$@" && while kill -0 $pid 2>/dev/null && ! grep -q "^State:.*Z" /proc/$pid/status; do sleep 0.1; done; }
load() { vshunt-bench blk --socket /tmp/s --quiet "$@"; }
# told LIST KEY: the values of a key in a list, in its order.
told() { vshunt qmp query-$1 | sed -n "s/^ *\\"$2\\": *\\"\\{0,1\\}\\([^\\",]*\\).*/\\1/p" | tr '\\n' ' '; }
is() { [ "$1" = "$2" ] || { echo "it is '$1', not '$2'"; return 1; }; }
# engine_is KIND: of the only export.
engine_is() { is "$(told exports engine)" "$1 " || { vshunt status --json | grep engine-reason; return 1; }; }
# The last file that uses the module may be closed a moment after its process ended.
unloads() {
    n=0
    while ! rmmod vhost_blk 2>/dev/null; do
        n=$((n + 1))
        [ $n -lt 300 ] || { echo "the module is in use"; return 1; }
        sleep 0.1
    done
}
# Refused, with a message that has this in it.
refused() { fails "$@"; }
"""

CHOOSING = (
    COMMON.replace("need vhost_blk\n", "")
    + """
serve file=/dev/ram0 queues=2,engine=auto
result "choosing: without the module engine=auto is ours" engine_is user
result "choosing: and says why" sh -c "vshunt status --json | grep engine-reason"
result "choosing: without the module engine=kernel is refused" refused "modprobe vhost_blk" \\
    vshunt export add type=vhost-user-blk,name=e1,disk=d0,socket=/tmp/s1,readonly=on,engine=kernel
result "choosing: it ends" quit
need vhost_blk
serve file=/dev/ram0 queues=2,engine=auto
result "choosing: with the module engine=auto is the kernel" engine_is kernel
result "choosing: it ends" quit
serve file=/dev/ram0 queues=2,workers=per-cpu,engine=kernel
pinned_each() { n=0; while [ $n -lt 2 ]; do vshunt status | grep -qE "^ +[0-9]+ .*kernel +$n " || return 1; n=$((n + 1)); done; }
result "choosing: workers=per-cpu pins a worker of the kernel to each CPU" pinned_each
result "choosing: it ends" quit
mkdir -p /etc /tmp/u
echo nobody:x:65534:65534::/:/bin/sh >/etc/passwd
chmod 777 /tmp/u
chmod 666 /dev/ram0
chmod 600 /dev/vhost-blk
as_nobody() { su nobody -s /bin/sh -c "vshunt serve -c /tmp/u/c --disk name=d0,file=/dev/ram0 \
    --export type=vhost-user-blk,name=e0,disk=d0,socket=/tmp/u/s,queues=1,engine=$1"; }
result "choosing: without the right to the device engine=kernel is refused" refused "ermission" as_nobody kernel
rm -f /tmp/u/*
as_nobody auto &
export VSHUNT_CONTROL=/tmp/u/c
up
result "choosing: and engine=auto is ours" engine_is user
result "choosing: and says why" sh -c "vshunt status --json | grep 'engine-reason.*ermission'"
result "choosing: it ends" vshunt quit
export VSHUNT_CONTROL=$C
chmod 600 /dev/ram0
# A container, as far as it matters here: threads have other numbers than the kernel names its
# workers by.
contained() { unshare --pid --fork --mount-proc sh -c 'vshunt serve -q -c /tmp/c --disk name=d0,file=/dev/ram0 \
    --export type=vhost-user-blk,name=e0,disk=d0,socket=/tmp/s,queues=2,workers=2,engine=kernel' & }
contained
up
result "choosing: in a PID namespace of its own it is the kernel, too" is "$(told workers kind)" "user kernel kernel "
result "choosing: a worker is pinned there" vshunt worker set e0/1 --cpu 1
result "choosing: and is there" sh -c "grep -l '^Name:.vhost-' /proc/[0-9]*/task/*/status | xargs grep '^Cpus_allowed_list:.1$'"
result "choosing: it ends" vshunt quit
wait
unloads
rmmod vhost
need vhost fork_from_owner_default=0
need vhost_blk
result "choosing: kernel threads are the default of vhost now" is "$(cat /sys/module/vhost/parameters/fork_from_owner_default)" N
serve file=/dev/ram0 queues=2,workers=2,engine=kernel
result "choosing: and its workers are threads of the daemon all the same" is "$(told workers kind)" "user kernel kernel "
result "choosing: one is pinned there" vshunt worker set e0/1 --cpu 1
result "choosing: it ends" quit
"""
)

DISK = (
    COMMON
    + """
serve file=/dev/ram0 queues=2,workers=per-queue,engine=kernel
result "disk: one in use is refused" refused "is in use by another process" vshunt serve --no-control \\
    --disk name=d1,file=/dev/ram0 --export type=vhost-user-blk,name=e1,disk=d1,socket=/tmp/s1,engine=kernel
result "disk: the engine is told" engine_is kernel
result "disk: a worker of the kernel for each queue" is "$(told workers kind)" "user kernel kernel "
result "disk: written and read back by two queues" load --rw randrw --verify --queues 2 --iodepth 16 --runtime 2s
result "disk: rings without indirect descriptors and event index" \\
    load --rw randrw --verify --queues 2 --no-indirect --no-event-idx --bs 64k --iodepth 8 --runtime 1s
result "disk: large requests" load --rw randrw --verify --queues 1 --bs 1M --iodepth 4 --runtime 1s
result "disk: flushes" load --rw randwrite --verify --queues 2 --flush-every 4 --runtime 1s
packed() { fails "packed" load --packed --runtime 1s; }
result "disk: packed rings are not offered" packed
moves() { # SECONDS
    # Not the function: it is interrupted, and that would be another process around it.
    vshunt-bench blk --socket /tmp/s --quiet --rw randrw --verify --queues 2 --iodepth 16 --runtime 1h >/tmp/load 2>&1 &
    client=$!
    n=0
    end=$(($(date +%s) + $1))
    while kill -0 $client 2>/dev/null && { [ $n -lt 4 ] || [ $(date +%s) -lt $end ]; }; do
        id=$(vshunt worker new --kind kernel --export e0) || return 1
        vshunt attach e0:$((n % 2)) $id || return 1
        [ -n "$last" ] && { vshunt attach e0:$(((n + 1) % 2)) $id && vshunt worker free $last || return 1; }
        last=$id
        echo $id >/tmp/last
        n=$((n + 1))
    done
    kill -INT $client
    wait $client || { cat /tmp/load; return 1; }
    [ $n -gt 3 ] || { echo "only $n turns"; return 1; }
}
result "disk: workers made, attached and freed while it is verified" moves 5
last=$(cat /tmp/last)
result "disk: the first worker is freed like others" vshunt worker free e0/0
result "disk: and so are those that came after it" moves 2
last=$(cat /tmp/last)
counted() {
    requests=$(told queues requests)
    set -- $requests
    [ "$1" -gt 100 ] && [ "$2" -gt 100 ] || { echo "queues counted $requests"; return 1; }
    is "$(told queues errors)" "0 0 " && is "$(told queues in-flight)" "0 0 "
}
result "disk: counters" counted
result "disk: a worker pinned" vshunt worker set $last --cpu 1
result "disk: is pinned" sh -c "vshunt status | grep -E '^ +$last .*kernel +1 '"
result "disk: a user-space worker is not for it" refused "kind kernel" vshunt attach e0:0 0
result "disk: a worker with a queue is not freed" refused "queue" vshunt worker free $last
result "disk: kernel workers do not poll" refused "poll" vshunt worker set $last --poll-us 5
vshunt disk add name=d1,format=null,size=1M
vshunt export add type=vhost-user-blk,name=e1,disk=d1,socket=/tmp/s1,queues=1
result "disk: a kernel worker is not for another export" refused "export e0 only" vshunt attach e1:0 $last
result "disk: kernel workers are not made for other exports" refused "engine=kernel" vshunt worker new --kind kernel --export e1
vshunt disk add name=d2,file=/dev/ram0,readonly=on,locking=off
result "disk: engine=auto takes the kernel" vshunt export add type=vhost-user-blk,name=e2,disk=d2,socket=/tmp/s2,queues=1,engine=auto
result "disk: and says so" is "$(told exports engine)" "kernel user kernel "
written() { fails "read-only" vshunt-bench blk --socket /tmp/s2 --rw randwrite --runtime 1s --quiet; }
result "disk: a read-only one is not written" written
result "disk: and read" vshunt-bench blk --socket /tmp/s2 --rw randread --runtime 1s --quiet
result "disk: its removal ends its workers" vshunt export remove e2
result "disk: that is so" is "$(vshunt status --json | grep -c '"export": "e2"')" 0
busy() { fails "front end" vshunt export remove e0; }
load --rw randread --runtime 300s >/dev/null 2>&1 &
client=$!
until [ "$(told exports connected | cut -d' ' -f1)" = true ]; do sleep 0.1; done
result "disk: in use it is not removed" busy
result "disk: but by force" vshunt export remove e0 --force
wait $client
result "disk: the daemon ends" quit
result "disk: nothing of it is left" sh -c "! ls /tmp/s /tmp/s1 /tmp/s2 2>/dev/null"
result "disk: the module can go" unloads
insmod /modules/vhost_blk.ko

dd if=/dev/zero of=/tmp/image bs=1M count=16 2>/dev/null
serve file=/tmp/image queues=1,engine=kernel
result "file: a loop device bears its name" is "$(cat /sys/block/loop0/loop/backing_file)" /tmp/image
result "file: written and read back" load --rw randrw --verify --iodepth 8 --runtime 2s
load --rw randrw --verify --iodepth 8 --range 8M --runtime 3s >/tmp/load 2>&1 &
client=$!
until set -- $(told queues requests) && [ "${1:-0}" -gt 100 ] || ! kill -0 $client; do sleep 0.05; done
result "file: it grows under load" vshunt resize d0 32M
result "file: the loop device, too" is "$(cat /sys/block/loop0/size)" 65536
result "file: it shrinks under load" vshunt resize --shrink d0 8M
result "file: the loop device, too" is "$(cat /sys/block/loop0/size)" 16384
result "file: and its size is that" is "$(stat -c %s /tmp/image)" 8388608
wait $client
result "file: the load saw nothing of it" is $? 0
result "file: the daemon ends" quit
result "file: the loop device is gone" sh -c "! cat /sys/block/loop0/loop/backing_file 2>/dev/null"

need dm_mod
need dm_delay
slow=$(dm-table slow 131072 delay /dev/ram1 0 8000)
serve file=$slow queues=2,workers=2,engine=kernel
vshunt-bench blk --socket /tmp/s --quiet --rw randread --queues 2 --iodepth 4 --runtime 300s >/dev/null 2>&1 &
client=$!
until set -- $(told queues in-flight) && [ "${1:-0}" = 4 ]; do sleep 0.05; done
kill -9 $client
wait $client
# The session stops its rings by now, or is about to, and waits for the disk.
waits() {
    n=0
    end=$(($(date +%s) + 40))
    while [ $(date +%s) -lt $end ]; do
        said=$(vshunt attach e0:0 e0/$((n % 2)) --timeout 100ms 2>&1) ||
            case $said in *"e0:0 waits for its disk"* | *"export e0 waits for its disk"*) return 0 ;; *) break ;; esac
        n=$((n + 1))
    done
    echo "attached $n times, then: $said"
    return 1
}
result "slow: a queue that is about to stop and waits for its disk: attach says so" waits
result "slow: it ends" quit
"""
)

# @KILLS@: how often daemons and front ends are killed; see `of_kills`.
ENDS = (
    COMMON
    + """
insmod /modules/vhost_blk.ko 2>/dev/null
gone() { unloads && insmod /modules/vhost_blk.ko; }
# Without what single CPUs have not added yet.
pinned() { echo 1 >/proc/sys/vm/stat_refresh
    awk '/nr_foll_pin_acquired/ { a = $2 } /nr_foll_pin_released/ { r = $2 } END { print a - r }' /proc/vmstat; }
before=$(pinned)
killed() {
    n=0
    while [ $n -lt @KILLS@ ]; do
        serve file=/dev/ram0 queues=2,workers=per-queue,engine=kernel
        load --rw randrw --queues 2 --iodepth 32 --runtime 300s >/dev/null 2>&1 &
        client=$!
        until set -- $(told queues requests) && [ "${1:-0}" -gt 500 ]; do sleep 0.05; done
        kill -9 $pid
        wait $pid
        wait $client && { echo "the front end saw nothing of the end"; return 1; }
        n=$((n + 1))
    done
    is "$(pinned)" "$before" && gone
}
result "ends: kill -9 of the daemon under load, @KILLS@ times; pages given back, module free" killed
loops() {
    dd if=/dev/zero of=/tmp/image bs=1M count=16 2>/dev/null
    serve file=/tmp/image queues=1,engine=kernel
    load --rw randrw --iodepth 8 --runtime 300s >/dev/null 2>&1 &
    client=$!
    until set -- $(told queues requests) && [ "${1:-0}" -gt 100 ]; do sleep 0.05; done
    kill -9 $pid
    wait $pid
    wait $client
    n=0
    while [ -e /sys/block/loop0/loop/backing_file ]; do
        n=$((n + 1))
        [ $n -lt 300 ] || { echo "the loop device is left behind"; return 1; }
        sleep 0.1
    done
}
result "ends: no loop device outlives a killed daemon" loops
front() {
    serve file=/dev/ram0 queues=2,workers=per-queue,engine=kernel
    n=0
    while [ $n -lt @KILLS@ ]; do
        # Not the function: that would be another process around it.
        vshunt-bench blk --socket /tmp/s --quiet --rw randrw --queues 2 --iodepth 32 --runtime 300s >/dev/null 2>&1 &
        client=$!
        set -- $(told queues requests)
        least=$(($1 + 200))
        until set -- $(told queues requests) && [ $1 -gt $least ]; do sleep 0.02; done
        kill -9 $client
        wait $client
        until [ "$(told exports connected)" = "false " ]; do sleep 0.05; done
        n=$((n + 1))
    done
    is "$(told queues in-flight)" "0 0 " && load --rw randrw --verify --queues 2 --runtime 1s && quit
}
result "ends: kill -9 of the front end under load, @KILLS@ times, and on with the next" front
under_load() {
    serve file=/dev/ram0 queues=2,workers=2,engine=kernel
    load --rw randrw --queues 2 --iodepth 32 --runtime 300s >/dev/null 2>&1 &
    client=$!
    until set -- $(told queues requests) && [ "${1:-0}" -gt 500 ]; do sleep 0.05; done
    kill -TERM $pid
    wait $pid
    is $? 0 || return 1
    wait $client && { echo "the front end saw nothing of the end"; return 1; }
    gone
}
result "ends: SIGTERM under load" under_load
# Slow enough that a daemon that is killed leaves requests behind.
need null_blk nr_devices=1 gb=1 memory_backed=1 queue_mode=2 irqmode=2 completion_nsec=1000000
begins() { # ENGINE
    vshunt serve -v -c $C --disk name=d0,file=$disk \\
        --export type=vhost-user-blk,name=e0,disk=d0,socket=/tmp/s,queues=2,workers=2,engine=$1 >>/tmp/serve 2>&1 &
    pid=$!
    up
}
# Until the guest has done something with this daemon, or has ended.
works() {
    until set -- $(told queues requests) && [ "${1:-0}" -gt 100 ] && [ "$2" -gt 100 ]; do
        kill -0 $client 2>/dev/null || return
        sleep 0.05
    done
}
# survives DISK ENGINE...: daemons of these engines are killed one after the other, and the guest
# continues.
survives() {
    disk=$1
    shift
    rm -f /tmp/serve
    client=
    for engine; do
        begins $engine
        [ -n "$client" ] || {
            vshunt-bench blk --socket /tmp/s --quiet --rw randrw --verify --range 16M --queues 2 --iodepth 16 --bs 4k \\
                --reconnect 60s --runtime 1h >/tmp/load 2>&1 &
            client=$!
        }
        works
        kill -9 $pid
        wait $pid
    done
    begins kernel
    works
    # Whether a kill finds requests in flight depends on the moment.
    n=0
    until grep -q "requests were in flight" /tmp/serve || [ $n = 30 ]; do
        kill -9 $pid
        wait $pid
        begins kernel
        works
        n=$((n + 1))
    done
    kill -INT $client
    wait $client
    code=$?
    quit
    [ $code = 0 ] || { cat /tmp/load; tail -n 5 /tmp/serve; return 1; }
    grep -q "requests were in flight" /tmp/serve || { echo "none was in flight when a daemon was killed"; return 1; }
}
result "ends: kill -9 under verified load, and on with the next daemon, @KILLS@ times" survives /dev/nullb0 @KERNELS@
result "ends: kill -9, and on with the other engine, @KILLS@ times" survives /dev/nullb0 @ENGINES@
dd if=/dev/zero of=/tmp/image bs=1M count=16 2>/dev/null
result "ends: kill -9 under verified load of a file, @FILE_KILLS@ times" survives /tmp/image @FILE_KERNELS@
result "ends: the module can go" unloads
"""
)


def of_kills(job, kills):
    """The job with this number of kills, and half as many of a daemon that serves a file."""
    engines = itertools.cycle(("kernel", "user", "user", "kernel", "user"))
    words = {"KILLS": kills, "KERNELS": "kernel " * kills, "ENGINES": " ".join(itertools.islice(engines, kills))}
    words |= {"FILE_KILLS": kills // 2, "FILE_KERNELS": "kernel " * (kills // 2)}
    for name, value in words.items():
        job = job.replace(f"@{name}@", str(value).strip())
    return job


# What holds for rings that are served here holds for those that are handed over: the same tests
# (crates/vshunt/tests/device) with engine=kernel.
DEVICE = (
    COMMON
    + """
mkdir -p /var/tmp
export VSHUNT_TEST_ENGINE=kernel
device-test --test-threads=2 @WHICH@ >/tmp/device 2>&1
rc=$?
sed -n -e 's/^test \\(.*\\) \\.\\.\\. ok$/ok device: \\1/p' -e 's/^test \\(.*\\) \\.\\.\\. FAILED$/not ok device: \\1/p' /tmp/device
[ $rc = 0 ] || grep -v '^test ' /tmp/device | head -n 120
result "device: the suite ended well" is $rc 0
result "device: the module can go" unloads
"""
)
