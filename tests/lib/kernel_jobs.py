"""Shell jobs for the VMs of `tests/kernel`.

They drive the module alone, with the programs in kmod/tests and vshunt-bench. @SEED@ is
VSHUNT_SEED, the seed of all random choices.
"""

# A RAM disk that the cases write to, and one more.
BRD = "need brd rd_nr=2 rd_size=65536\n"

# Pages that are pinned now; what the CPUs keep for themselves is folded in first.
PINNED = """
pinned() {
    echo 1 >/proc/sys/vm/stat_refresh
    awk '/^nr_foll_pin_acquired/ { n += $2 } /^nr_foll_pin_released/ { n -= $2 } END { print n + 0 }' /proc/vmstat
}
none_pinned() { now=$(pinned); [ "$now" = "$before" ] || { echo "$((now - before)) pages are pinned"; return 1; }; }
before=$(pinned)
"""

LOADING = """
result "loading: a module of another kernel is refused" fails "invalid module format" insmod /modules/other_kernel.ko
result "loading: and the kernel says why" sh -c "dmesg | tail -n 3 | grep 'vhost_blk: disagrees about version of symbol'"
result "loading: without vhost.ko it is refused" fails "unknown symbol" insmod /modules/vhost_blk.ko
need vhost_blk
result "loading: /dev/vhost-blk is there" [ -c /dev/vhost-blk ]
result "loading: only root may open it" [ "$(stat -c %a /dev/vhost-blk)" = 600 ]
exec 3<>/dev/vhost-blk
result "loading: unloading is refused while it is open" fails "" rmmod vhost_blk
result "loading: and it stays" [ -c /dev/vhost-blk ]
exec 3>&-
result "loading: unloaded when closed, nothing left" leaves_nothing
result "loading: /dev/vhost-blk is gone" [ ! -e /dev/vhost-blk ]
n=0
while [ $n -lt 20 ]; do insmod /modules/vhost_blk.ko && rmmod vhost_blk || break; n=$((n + 1)); done
result "loading: loaded and unloaded 20 times" [ $n = 20 ]
need brd rd_nr=1 rd_size=65536
insmod /modules/vhost_blk.ko
vhost-blk-test errors
result "loading: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""

SERVING = (
    PINNED
    + BRD
    + """
need vhost_blk
vhost-blk-test --seed @SEED@ io
# Completions from a timer's interrupt.
need null_blk nr_devices=1 gb=1 memory_backed=1 queue_mode=2 irqmode=2 completion_nsec=20000
vhost-blk-test --seed @SEED@ --disk /dev/nullb0 io
result "io: no page is pinned" none_pinned
result "io: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""
)

LIVING = (
    PINNED
    + BRD
    + """
need vhost_blk
vhost-blk-test --seed @SEED@ life
vhost-blk-test --seed @SEED@ inflight
# Slow enough that a killed owner leaves requests behind.
need null_blk nr_devices=1 gb=1 memory_backed=1 queue_mode=2 irqmode=2 completion_nsec=1000000
vhost-blk-test --seed @SEED@ --disk /dev/nullb0 inflight-kill
result "life: no page is pinned" none_pinned
result "life: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""
)

LYING = (
    PINNED
    + BRD
    + """
need vhost_blk
vhost-blk-test --seed @SEED@ hostile
result "hostile: no page is pinned" none_pinned
result "hostile: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""
)

# Data that is large, copied, in blocks of its own size, by workers that are kernel threads.
WIDE = (
    PINNED
    + BRD
    + """
need vhost fork_from_owner_default=0
need vhost_blk
vhost-blk-test data
# Slow enough that all of it is in flight at once.
need dm_mod
need dm_delay
slow=$(dm-table slow 131072 delay /dev/ram1 0 100)
vhost-blk-test --disk "$slow" room
need null_blk nr_devices=1 gb=1 memory_backed=1 bs=4096 discard=1
vhost-blk-test --disk /dev/nullb0 data
need sd_mod
need scsi_debug dev_size_mb=128 sector_size=4096 lbpws=1 lbpu=1
n=0
while [ ! -b /dev/sda ] && [ $n -lt 900 ]; do sleep 0.1; n=$((n + 1)); done
vhost-blk-test --disk /dev/sda data
result "data: no page is pinned" none_pinned
result "data: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""
)

FAILING = (
    PINNED
    + BRD
    + """
need vhost_blk
need sd_mod
need scsi_debug dev_size_mb=64 delay=0 opts=2 max_queue=64
n=0
while [ ! -b /dev/sda ] && [ $n -lt 900 ]; do sleep 0.1; n=$((n + 1)); done
vhost-blk-test --disk /dev/sda fault-medium
echo 0 >/sys/bus/pseudo/drivers/scsi_debug/opts
vhost-blk-test --disk /dev/sda durable
# A second, in ticks of 4 ms.
echo 250 >/sys/bus/pseudo/drivers/scsi_debug/delay
vhost-blk-test --disk /dev/sda fault-slow
vhost-blk-test --disk /dev/sda inflight-slow
echo 0 >/sys/bus/pseudo/drivers/scsi_debug/delay
need dm_flakey
flaky=$(dm-table flaky 131072 flakey /dev/ram1 0 1 1)
vhost-blk-test --disk "$flaky" fault-some
result "fault: no page is pinned" none_pinned
result "fault: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""
)

DRIVEN = (
    PINNED
    + """
need brd rd_nr=1 rd_size=131072
need null_blk nr_devices=1 gb=1 memory_backed=1 queue_mode=2 irqmode=2 completion_nsec=20000
need vhost_blk
disk=/dev/ram0
# driven NAME ARGUMENT...: what the driver prints is shown when it fails.
driven() {
    name=$1
    shift
    result "driven: $name" vshunt-bench kernel --quiet --timeout 60s --stall 90s --backend $disk "$@"
    none_pinned || echo "not ok driven: $name: pages are pinned"
}
driven "every request type, right and wrong, cut at random" --check 60 --layout random --queues 2
driven "verified, cut at random, a worker a queue" \\
    --rw randrw --verify --layout random --queues 4 --workers per-queue --runtime 3s
driven "verified, queues moved between workers that come and go" \\
    --rw randrw --verify --queues 4 --workers 2 --attach-every 3ms --runtime 4s
driven "the log switched on and off: all that is written is in it" \\
    --rw randrw --verify --layout random --queues 2 --log-every 100ms --runtime 4s
driven "10,000 chains that lie@CORPUS@" --hostile 10000 --seed @SEED@
disk=/dev/nullb0
driven "verified on null_blk, completions from interrupts" \\
    --rw randrw --verify --layout random --queues 4 --workers per-queue --runtime 3s
driven "the log, moves, on null_blk" --rw randrw --verify --queues 4 --log-every 100ms --attach-every 10ms --runtime 4s
result "driven: after use nothing is left allocated, and it is unloaded" leaves_nothing
"""
)
