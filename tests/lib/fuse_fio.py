"""Runs fio with four verifying jobs on a mounted file."""

import rig as r

FIO_JOBS = 4
FIO_REGION = 4 << 20


def fio_argv(path, seconds, base=0, seed=7):
    """Four jobs that verify their writes, each in its own region from `base` on."""
    options = {
        "filename": path, "ioengine": "libaio", "direct": 1, "iodepth": 8, "verify": "crc32c", "verify_backlog": 64,
        "verify_fatal": 1, "verify_state_save": 0, "serialize_overlap": 1, "fallocate": "none", "allow_file_create": 0, "time_based": 1,
        "runtime": seconds, "size": FIO_REGION, "eta": "never", "thread": 1, "randseed": seed,
    }  # fmt: skip
    argv = [r.tool("fio", "fio"), *(f"--{key}={value}" for key, value in options.items())]
    for job, (rw, bs) in enumerate((("randwrite", "4k"), ("randrw", "16k"), ("randwrite", "64k"), ("write", "128k"))):
        argv += [f"--name=job{job}", f"--offset={base + job * FIO_REGION}", f"--rw={rw}", f"--bs={bs}"]
    return argv
