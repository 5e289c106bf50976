"""The load: one run of fio (libblkio on a socket, io_uring on a file, libnbd), of `vshunt-bench blk` or of SPDK's bdevperf, bounded in
time.

A job is `rr|rw|sw : depth : queues [: block size]`, random reads or writes or sequential writes, one queue and one thread a fio job.
"""
import json
import os
import re
import subprocess
from dataclasses import dataclass

import spdk
from server import child_setup, end

RW = {"rr": "randread", "rw": "randwrite", "sr": "read", "sw": "write"}
QUEUE_SIZE = 512  # three descriptors a request: 128 deep fits


class ClientError(Exception):
    """The load failed; the text is its last words."""


class Hung(Exception):
    """The load did not end in its time."""


@dataclass(frozen=True)
class Job:
    """What to run; `awake` holds /dev/cpu_dma_latency at 0 meanwhile."""
    rw: str
    depth: int
    queues: int
    bs: str = "4k"
    awake: bool = False

    @staticmethod
    def parse(text, awake=False):
        a = text.split(":")
        return Job(a[0], int(a[1]), int(a[2]), a[3] if len(a) > 3 else "4k", awake)

    def __str__(self):
        size = "" if self.bs == "4k" else f":{self.bs}"
        return f"{self.rw}:{self.depth}:{self.queues}{size}{' awake' if self.awake else ''}"


class Client:
    """The program that makes the load. `tools` is run.py's; cpus None: anywhere. A run that takes more than twice
    its time and `grace_s` hangs. `wait`: 'block' waits in the kernel for completions, 'loop' polls for them (fio only)."""

    def __init__(self, tools, time_s, grace_s, cpus, wait="block"):
        self.tools, self.time_s, self.grace_s, self.cpus, self.wait = tools, time_s, grace_s, cpus, wait

    def lacks(self, job):
        """Why it cannot run a job on a socket, or None."""
        if self.tools.bdevperf and job.queues > len(self._polled()):
            return f"bdevperf polls each queue on a CPU of its own, and has {len(self._polled())}"
        return None

    def _polled(self):
        """The CPUs that bdevperf may poll: those that SPDK's vhost does not."""
        here = self.cpus or os.sched_getaffinity(0)
        return sorted(set(here) - set(spdk.cpus(self.tools.spdk_mask)))

    def load_socket(self, job, server, on_hang):
        """-> {'iops', 'ios', 'p50_us', 'p99_us', 'cpu_us'}: cpu_us is the server's CPU time an I/O."""
        if why := self.lacks(job):
            raise ClientError(why)
        before = server.cpu_s()
        if self.tools.bdevperf:
            argv = spdk.bdevperf(self.tools.bdevperf, server.sock, RW[job.rw], job, QUEUE_SIZE, self.time_s, self._polled()[-job.queues:])
            result = spdk.bdevperf_result(self.bounded(argv, None, on_hang), self.time_s)
            if result is None:
                raise ClientError("bdevperf: requests failed, or it printed no result")
        elif self.tools.fio_blkio:
            argv = [*self.tools.fio_blkio, *self._fio_args(job), "--ioengine=libblkio",
                    "--libblkio_driver=virtio-blk-vhost-user", f"--libblkio_path={server.sock}",
                    f"--libblkio_queue_size={QUEUE_SIZE}", f"--libblkio_wait_mode={self.wait}"]
            result = fio_result(self.bounded(argv, self.cpus, on_hang))
        else:
            argv = [self.tools.bench, "blk", "--socket", server.sock, "--rw", RW[job.rw], "--bs", job.bs,
                    "--iodepth", str(job.depth), "--queues", str(job.queues), "--queue-size", str(QUEUE_SIZE),
                    "--runtime", f"{self.time_s}s", "--server-pid", str(server.pid), "--quiet", "--json"]
            result = _bench_result(self.bounded(argv, self.cpus, on_hang))
        if result["ios"]:
            result["cpu_us"] = (server.cpu_s() - before) * 1e6 / result["ios"]
        return result

    def fill(self, server, size):
        """Writes the first `size` bytes of a server's disk."""
        self.bounded([self.tools.bench, "blk", "--socket", server.sock, "--rw", "write", "--bs", "128k", "--iodepth", "8", "--size", str(size),
                      "--quiet"], self.cpus, lambda _: None)

    def load_file(self, job, path):
        """The host's own figure: fio with io_uring on the file itself, on every CPU that a server and its
        client have together."""
        argv = [*self.tools.fio_file, *self._fio_args(job), "--ioengine=io_uring", f"--filename={path}"]
        return fio_result(self.bounded(argv, None, lambda _: None))

    def load_disk(self, job, path):
        """The load on a disk itself: a file or `nbd+unix:…`."""
        if path.startswith("nbd"):
            return self.load_nbd(job, path, None, lambda _: None)
        return self.load_file(job, path)

    def load_nbd(self, job, uri, cpus, on_hang):
        """fio with libnbd on an NBD server, a connection for each of its jobs."""
        argv = [*self.tools.fio_nbd, *self._fio_args(job), "--ioengine=nbd", f"--uri={uri}"]
        return fio_result(self.bounded(argv, cpus, on_hang))

    def load_export(self, job, server, on_hang, export):
        """The same on an NBD server under test. -> as load_socket."""
        before = server.cpu_s()
        result = self.load_nbd(job, f"nbd+unix:///{export}?socket={server.sock}", self.cpus, on_hang)
        result["cpu_us"] = (server.cpu_s() - before) * 1e6 / result["ios"]
        return result

    def _fio_args(self, job):
        return ["--name=j", "--output-format=json", "--direct=1", "--thread=1", f"--rw={RW[job.rw]}", f"--bs={job.bs}",
                f"--iodepth={job.depth}", f"--numjobs={job.queues}", "--group_reporting=1", "--time_based=1",
                f"--runtime={self.time_s}", "--norandommap=1", "--randrepeat=0", "--random_generator=tausworthe64"]

    def bounded(self, argv, cpus, on_hang):
        """-> its stdout. `on_hang(pid)` is called before a run that hangs is ended."""
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, preexec_fn=child_setup(cpus))
        try:
            out, err = process.communicate(timeout=2 * self.time_s + self.grace_s)
        except subprocess.TimeoutExpired:
            on_hang(process.pid)
            raise Hung from None
        finally:
            end(process)
        if process.returncode:
            raise ClientError(f"status {process.returncode}: {(err + out)[-300:].strip()}")
        return out


def fio_result(text):
    """fio's JSON -> {'iops', 'ios', 'p50_us', 'p99_us'}, over all jobs."""
    start = re.search(r"^\{", text, re.M)
    if not start:
        raise ClientError(f"fio wrote no JSON: {text[-300:].strip()}")
    result = {"iops": 0.0, "ios": 0, "p50_us": 0.0, "p99_us": 0.0}
    for job in json.loads(text[start.start():])["jobs"]:
        if job["error"]:
            raise ClientError(f"fio: error {job['error']}")
        for kind in ("read", "write"):
            if job[kind]["total_ios"]:
                percentile = job[kind]["clat_ns"].get("percentile", {})
                result["iops"] += job[kind]["iops"]
                result["ios"] += job[kind]["total_ios"]
                result["p50_us"] = percentile.get("50.000000", 0) / 1e3
                result["p99_us"] = percentile.get("99.000000", 0) / 1e3
    if not result["ios"]:  # the engine nbd reports no error without a connection
        raise ClientError("fio: no request completed")
    return result


def _bench_result(text):
    summary = json.loads(text)
    used = max(summary["read"], summary["write"], key=lambda d: d["ios"])
    return {"iops": summary["iops"], "ios": summary["read"]["ios"] + summary["write"]["ios"],
            "p50_us": used["latency_ns"]["p50"] / 1e3, "p99_us": used["latency_ns"]["p99"] / 1e3}
