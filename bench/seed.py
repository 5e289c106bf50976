"""Figures of others, printed beside ours. Each was measured by its author, on hardware unlike ours: shapes and
ratios are to be compared, not the numbers. Thousand I/Os a second; `rr` / `rw`: random read / write.
"""

VHOST_WORKERS = {
    "title": "vhost with several workers: thousand IOPS",
    "source": "the table that started this: vhost-scsi, VM with 16 vCPUs and 16 virtqueues; fio 4k randrw, direct, libaio, "
              "depth 128, at most 1,024 commands in all",
    "columns": ["jobs", "1", "2", "4", "8", "12", "16"],
    "rows": [
        ["1 worker", 84, 492, 510, None, None, None],
        ["a worker per virtqueue", 184, 380, 744, 1422, 2256, 2434],
        ["1 worker, io_uring with batching", 494, 520, None, None, None, None],
        ["a worker per virtqueue, same", 496, 878, 1542, 2436, 2304, 2590],
    ],
}

VHOST_BLK_RAM = {
    "title": "vhost-blk on a RAM disk, queues = vCPUs: thousand IOPS, rr / rw",
    "source": "the vhost-blk patches; fio 4k, direct, libaio, depth 128, cache=none",
    "columns": ["vCPUs", "1", "2", "4", "8, 1 thread", "8, 2 threads"],
    "rows": [
        ["QEMU virtio-blk", "123 / 129", "253 / 250", "158 / 154", None, None],
        ["vhost-blk", "110 / 113", "247 / 252", None, "497 / 469", "730 / 701"],
    ],
}

VHOST_BLK_SSD = {
    "title": "vhost-blk on an SSD: thousand IOPS, rr / rw",
    "source": "the vhost-blk patches; fio 4k, direct, libaio, depth 128, cache=none, xfs",
    "columns": ["", "host", "QEMU virtio-blk", "vhost-blk"],
    "rows": [["", "95.8 / 85.3", "57.5 / 79.4", "95.6 / 84.3"]],
}

_BASELINE = ("measured earlier on a machine of the class that vshunt is built on (2 vCPUs, Linux 6.18), fio 3.41 with libblkio 1.5, "
             "4k, medians of 3; in brackets the server's CPU, us an I/O")

PEERS_NULL = {
    "title": "other back ends on null: thousand IOPS",
    "source": _BASELINE,
    "columns": ["", "rr:1:1", "rr:32:1", "rr:128:1", "rr:128:4"],
    "rows": [["storage daemon 11.1.3", "29 (14.3)", "1,231 (0.52)", "2,573 (0.36)", "2,165 (0.42)"]],
}

PEERS_TMPFS = {
    "title": "other back ends, raw on tmpfs: thousand IOPS, x to the storage daemon in the same run",
    "source": _BASELINE,
    "columns": ["", "storage daemon", "vhost_user_block", "ubiblk"],
    "rows": [
        ["rr:1:1", "28 (29)", "65 x2.32 (14)", "42 x1.50 (30)"],
        ["rr:32:1", "281 (3.0)", "380 x1.35 (2.6)", "159 x0.57 (9.7)"],
        ["rr:128:1", "300 (3.1)", "460 x1.53 (2.1)", "161 x0.54 (10.3)"],
        ["rr:128:4", "307 (3.0)", "442 x1.44 (2.1)", "206 x0.67 (9.3)"],
        ["rw:1:1", "30 (27)", "62 x2.07 (15)", "52 x1.73 (26)"],
        ["rw:32:1", "289 (3.1)", "385 x1.33 (2.5)", "145 x0.50 (10.5)"],
        ["rw:128:1", "333 (3.0)", "468 x1.41 (2.1)", "166 x0.50 (9.7)"],
        ["rw:128:4", "334 (3.0)", "461 x1.38 (2.1)", "345 x1.03 (5.7)"],
    ],
}

PEERS_EXT4 = {
    "title": "other back ends, raw on ext4, O_DIRECT: thousand IOPS",
    "source": _BASELINE,
    "columns": ["", "daemon, native", "daemon, io_uring", "vhost_user_block", "ubiblk", "the host's fio"],
    "rows": [
        ["rr:1:1", "13.2 (59)", "16.1 (30)", "15.0 (30)", "15.9 (64)", "19.2"],
        ["rr:32:1", "66 (7.0)", "61 (5.4)", "17 (24)", "65 (16)", "83"],
        ["rr:128:1", "85 (5.7)", "85 (4.8)", "18 (25)", "71 (14)", "90"],
        ["rr:128:4", "91 (7.5)", "hung", "18 (25)", "84 (8.4)", "89"],
        ["rw:1:1", "10.8 (55)", "15.3 (22)", "7.7 (59)", "12.7 (80)", "20"],
        ["rw:32:1", "77 (5.5)", "70 (4.2)", "7.7 (52)", "62 (16)", "112"],
        ["rw:128:1", "104 (6.0)", "94 (5.4)", "9.2 (49)", "105 (9.6)", "114-126"],
        ["rw:128:4", "106 (7.9)", "hung", "9.6 (45)", "109 (8.9)", "105-112"],
    ],
}
