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

PEERS_FUSE_NULL = {
    "title": "the storage daemon's FUSE export of null: thousand IOPS; 128k: MiB/s",
    "source": _BASELINE,
    "columns": ["storage daemon 11.1.3, iothreads", "1", "2", "4"],
    "rows": [
        ["psync:rr:1:1", "21 (20)", "43 (14)", "58 (16)"],
        ["psync:rr:1:4", "119 (7.5)", "115 (8.2)", "105 (10)"],
        ["psync:rw:1:1", "23", "42", "57"],
        ["psync:rw:1:4", "119", "115", "90"],
        ["aio:rr:32:1", "19 (21)", "40 (14)", "59 (14)"],
        ["io_uring:rr:32:4", "108 (7.7)", "132 (7.4)", "97 (11)"],
        ["io_uring:rw:32:4", "127 (6.0)", "130 (6.5)", "121 (8.1)"],
        ["psync:sr:1:1:128k", "1,500", "1,966", "1,801"],
        ["psync:sr:1:4:128k", "2,365", "2,435", "1,771"],
        ["psync:sw:1:1:128k", "1,198", "2,477", "2,586"],
        ["psync:sw:1:4:128k", "4,891", "5,074", "4,926"],
    ],
}

PEERS_FUSE_TMPFS = {
    "title": "the storage daemon's FUSE export of a raw image on tmpfs: thousand IOPS",
    "source": _BASELINE,
    "columns": ["storage daemon 11.1.3, iothreads", "1", "4"],
    "rows": [
        ["psync:rr:1:1", "22 (32)", "46 (23)"],
        ["psync:rw:1:1", "20 (30)", "46 (23)"],
        ["psync:rr:1:4", "114 (8.7)", "76 (15)"],
        ["psync:rw:1:4", "113 (8.7)", "120 (10)"],
        ["aio:rr:32:1", "20", "47"],
        ["aio:rw:32:1", "19", "45"],
        ["io_uring:rr:32:4", "108", "80"],
        ["io_uring:rw:32:4", "95", "84"],
    ],
}

PEERS_QCOW2 = {
    "title": "the storage daemon's qcow2, 64k clusters: thousand IOPS",
    "source": _BASELINE,
    "columns": ["storage daemon 11.1.3", "written, tmpfs", "written, ext4", "thin, tmpfs", "thin, ext4"],
    "rows": [
        ["rr:1:1", "29 (28)", "12.5 (67)", None, None],
        ["rr:32:1", "304 (3.2)", "63 (7.5)", None, None],
        ["rr:128:4", "358 (2.8)", "91 (7.8)", None, None],
        ["rw:1:1", "25 (28)", "11.0 (44)", "14.9 (58)", "7.5 (80)"],
        ["rw:32:1", "305 (3.2)", "94 (6.6)", "14.2 (69)", "10.7 (86)"],
        ["rw:128:1", "311 (3.2)", "116 (7.0)", "12.9 (102)", "11.6 (91)"],
        ["rw:128:4", "315 (3.1)", "126 (7.8)", "7.1 (170)", "6.4 (166)"],
    ],
}

# QEMU's FUSE export with several queues, published with the patches: thousand IOPS, one thread and
# four with a channel each. By (backend, pattern, engine): at 4 jobs (one thread, four), at 1 job
# (four, change in per cent).
FUSE_SOURCE = "the table that started this: QEMU, fio on hardware unlike ours, one thread and four threads with a channel each"
_FUSE_ORDER = [("s", "aio"), ("r", "aio"), ("s", "psync"), ("r", "psync")]
_FUSE_ROWS = {
    ("file", "r"): ([(104.7, 193.3), (111.5, 329.3), (71.0, 66.2), (41.4, 40.1)],
                    [(264.8, 120), (143.8, 27), (49.9, -5), (10.3, -1)]),
    ("file", "w"): ([(79.4, 219.7), (78.6, 217.2), (83.3, 92.5), (82.0, 91.9)],
                    [(226.6, 184), (225.9, 186), (36.9, -11), (36.9, -11)]),
    ("null", "r"): ([(260.5, 706.7), (260.1, 714.7), (291.8, 431.7), (280.1, 435.4)],
                    [(315.2, 18), (300.5, 14), (114.2, -16), (112.5, -16)]),
    ("null", "w"): ([(280.1, 746.9), (279.5, 749.0), (306.7, 420.7), (305.9, 419.1)],
                    [(222.6, -21), (220.5, -23), (117.2, -18), (116.3, -18)]),
}
FUSE = {(backend, order + way, engine): {4: four[n], 1: one[n]}
        for (backend, way), (four, one) in _FUSE_ROWS.items() for n, (order, engine) in enumerate(_FUSE_ORDER)}


def fuse_text(backend, pattern, engine, jobs):
    """A published cell, such as '104.7 -> 193.3 (+85 %)'."""
    a, b = FUSE[backend, pattern, engine][jobs]
    return f"{a} -> {b} ({b / a - 1:+.0%})" if jobs == 4 else f"... -> {a} ({b:+d}%)"
