"""The load: one run of fio on a mounted file, or on the file behind it, bounded in time.

A job is `engine : pattern : depth : jobs [: block size]`: `aio` (libaio) or `psync`; `rr`, `rw`, `sr`, `sw` for random
and sequential reads and writes; so many fio jobs, each with so much outstanding. Always O_DIRECT.
"""
from dataclasses import dataclass

from client import fio_result

ENGINES = {"aio": "libaio", "psync": "psync"}
PATTERNS = {"rr": "randread", "rw": "randwrite", "sr": "read", "sw": "write"}
UNITS = {"k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True)
class Job:
    """What to run; `awake` holds /dev/cpu_dma_latency at 0 meanwhile."""
    engine: str
    pattern: str
    depth: int
    jobs: int
    bs: str = "4k"
    awake: bool = False

    @staticmethod
    def parse(text, awake=False):
        a = text.split(":")
        return Job(a[0], a[1], int(a[2]), int(a[3]), a[4] if len(a) > 4 else "4k", awake)

    def __str__(self):
        size = "" if self.bs == "4k" else f":{self.bs}"
        return f"{self.engine}:{self.pattern}:{self.depth}:{self.jobs}{size}{' awake' if self.awake else ''}"

    @property
    def block_bytes(self):
        return int(self.bs[:-1]) * UNITS[self.bs[-1]]

    def fio_args(self, path, size, time_s):
        """Sequential jobs have a region each; together they stay within `size`."""
        sequential = self.pattern in ("sr", "sw")
        each = size // self.jobs if sequential else size
        region = [f"--size={each}"] + ([f"--offset_increment={each}"] if sequential else [])
        return ["--name=j", "--output-format=json", f"--filename={path}", f"--ioengine={ENGINES[self.engine]}", "--direct=1",
                "--thread=1", f"--rw={PATTERNS[self.pattern]}", f"--bs={self.bs}", f"--iodepth={self.depth}",
                f"--numjobs={self.jobs}", "--group_reporting=1", "--time_based=1", f"--runtime={time_s}", "--norandommap=1",
                "--randrepeat=0", "--random_generator=tausworthe64", "--allow_file_create=0", "--fallocate=none", *region]


def load(client, job, path, size, server=None, on_hang=lambda pid: None):
    """-> {'iops', 'ios', 'p50_us', 'p99_us', 'cpu_us'}: the last, the server's CPU time an I/O, where there is one."""
    before = server.cpu_s() if server else 0
    argv = [*client.tools.fio_file, *job.fio_args(path, size, client.time_s)]
    result = fio_result(client.bounded(argv, None, on_hang))
    if server and result["ios"]:
        result["cpu_us"] = (server.cpu_s() - before) * 1e6 / result["ios"]
    return result
