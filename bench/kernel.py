"""The kernel engine beside ours, on the same block device, in a VM under TCG: what a request costs, and what workers add.

In one VM the clock is the number of instructions (one vCPU), so that CPU time counts them: the same on every machine,
whatever else it does. In the other, two vCPUs run side by side, for what a second worker adds. IOPS under TCG say nothing
by themselves: only ratios within a run do. VMs and module are those of `tests/kernel`.
"""
import json
import os
import re
import statistics
import sys

import seed
from report import MET, MISSED, UNKNOWN, rate

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "lib"))
import kernel_vm as k  # noqa: E402
import rig as r  # noqa: E402

DEPTHS = (32, 128)
QUEUES = (1, 2, 4)
# As `engine=` has them. Ours polls by default; without that it has to be woken, as the kernel has.
ENGINES = ("user", "user,poll-us=0", "kernel")
LAYOUTS = {"1 worker": "1", "per-queue": "per-queue"}
MODULES = ("null_blk", "brd")

# Completions where they are submitted, one hardware queue a CPU: nothing but the engines and the
# block layer.
JOB = """
need null_blk nr_devices=1 gb=1 queue_mode=2 irqmode=0
need brd rd_nr=1 rd_size=131072
need vhost_blk
switches() { cat /proc/$pid/task/*/status | awk '/ctxt_switches/ { n += $2 } END { print n }'; }
# Nanoseconds of CPU time, as the scheduler counts them.
cpu() { cat /proc/$pid/task/*/schedstat | awk '{ n += $1 } END { printf "%.0f\\n", n }'; }
# serve DISK ENGINE WORKERS QUEUES
serve() {
    vshunt serve -q --disk name=d0,file=$1 -c /tmp/c \\
        --export type=vhost-user-blk,name=e0,disk=d0,socket=/tmp/s,queues=$4,workers=$3,engine=$2 &
    pid=$!
    until vshunt -c /tmp/c status >/dev/null 2>&1; do sleep 0.1; done
}
# load NAME QUEUES THREADS DEPTH RW MS
load() {
    switches=$(switches)
    cpu=$(cpu)
    out=$(vshunt-bench blk --socket /tmp/s --queues $2 --threads $3 --iodepth $4 --rw $5 --bs 4k --runtime $6ms --quiet --json 2>&1)
    say row "$1" $2 $4 $5 $(($(cpu) - cpu)) $(($(switches) - switches)) $(echo "$out" | tr -d '\\n')
}
ended() { vshunt -c /tmp/c quit; wait $pid; }
"""


def counting_job(ms):
    lines = []
    for engine in ENGINES:
        for layout in LAYOUTS.values():
            lines.append(f"serve /dev/nullb0 {engine} {layout} {max(QUEUES)}")
            for queues in QUEUES if layout != "1" else (1, 2, 4):
                for depth in DEPTHS:
                    lines.append(f"load {engine}/{layout} {queues} 1 {depth} randread {ms}")
            lines.append("ended")
    return JOB + "\n".join(lines) + "\nresult done true\n"


def workers_job(ms, reps):
    lines = []
    for _ in range(reps):
        for disk in ("/dev/nullb0", "/dev/ram0"):
            for engine in ENGINES[::2]:
                for layout in LAYOUTS.values():
                    lines.append(f"serve {disk} {engine} {layout} 2")
                    for rw in ("randread", "randwrite"):
                        lines.append(f"load {disk}/{engine}/{layout} 2 1 128 {rw} {ms}")
                    lines.append("ended")
    return JOB + "\n".join(lines) + "\nresult done true\n"


def rows(vm):
    """(name, queues, depth, rw) -> list of results, each with its server's CPU time, ns, and switches."""
    found = {}
    row = r"^@@ row (\S+) (\d+) (\d+) (\w+) (\d+) (\d+) (.*?)\r?$"
    for name, queues, depth, rw, cpu_ns, switches, text in re.findall(row, vm.child.output(), re.M):
        try:
            result = json.loads(text)
        except ValueError:
            raise r.Failed(f"vshunt-bench in the VM: {text[:300]}") from None
        result.update(cpu_ns=int(cpu_ns), switches=int(switches))
        found.setdefault((name, int(queues), int(depth), rw), []).append(result)
    return found


def requests(result):
    return result["read"]["ios"] + result["write"]["ios"]


def iops(results):
    return statistics.median(x["iops"] for x in results) if results else None


def run(b, vm, seconds):
    try:
        vm.finish(seconds)
    except r.Failed as e:
        vm.rig.failed += 1
        b.report.line(f"  {e}")
    return rows(vm)


def case(b):
    """Instructions and context switches a request; what a second worker adds; the seed's tables beside it."""
    b.report.heading("kernel", "the kernel engine (vhost_blk) and ours on one block device, in a VM under TCG")
    rig = r.Rig("bench-kernel")
    rig.line = lambda text: b.report.line(f"  {text}")
    try:
        folder, module = k.kernel("fetch"), k.kernel("build")
        modules = k.Modules(folder)
        with open(module, "rb") as f:
            modules.add("vhost_blk", f.read())
        for name in MODULES:
            modules.add(name)
        programs = {"vshunt": b.tools.vshunt, "vshunt-bench": b.tools.bench}
        base = k.Base(rig, folder, modules, {}, k.with_libraries(programs))
        with open(os.path.join(folder, "release")) as f:
            b.report.line(f"  VM: Linux {f.read().strip()}, QEMU {'.'.join(map(str, k.vm.qemu()[1]))}, TCG; module: kmod/vhost_blk")
        counted(b, run(b, k.Vm(rig, base, "counting", counting_job(100 if b.o.quick else 300), counting=True), 1200))
        reps = 1 if b.o.quick else b.o.reps
        several(b, run(b, k.Vm(rig, base, "workers", workers_job(500 if b.o.quick else 1500, reps)), 120 + 60 * reps))
    except (r.Skipped, r.Failed) as e:
        b.report.note(f"kernel: left out: {e}")
    finally:
        rig.end()


def counted(b, found):
    b.report.line("\n  null_blk, random reads of 4k, one load thread; 1 vCPU, instructions of the server's threads a request")
    table, verdicts = [], []
    for layout, flag in LAYOUTS.items():
        for queues in QUEUES:
            for depth in DEPTHS:
                cells = {e: found.get((f"{e}/{flag}", queues, depth, "randread")) for e in ENGINES}
                row = [f"{depth}:{queues} {layout}"]
                for key in (insns, switches):
                    values = [cells[e] and statistics.median(map(key, cells[e])) for e in ENGINES]
                    show = (lambda v: f"{v:,.0f}") if key is insns else (lambda v: f"{v:.4f}")
                    row += [None if v is None else show(v) for v in values]
                    row.append(f"x{values[-1] / values[0]:.2f}" if all(values) else None)
                    verdicts += [(f"{depth}:{queues} {layout}", key, e, v, values[-1]) for e, v in zip(ENGINES[:-1], values)]
                table.append(row)
    b.report.table(["depth:queues", "insns: user", "no polling", "kernel", "to user", "switches: user", "no polling", "kernel", "to user"],
                   table, "  ")
    for verdict in verdicts:
        judge(b, *verdict)
    b.report.data["cases"]["kernel"] = {"/".join(map(str, key)): value for key, value in found.items()}


def insns(result):
    """The VM's clock has a nanosecond an instruction."""
    return result["cpu_ns"] / requests(result)


def switches(result):
    return result["switches"] / requests(result)


def judge(b, job, key, engine, user, kernel):
    what = "instructions" if key is insns else "context switches"
    sentence = f"{job}: the kernel engine needs fewer {what} a request than engine={engine}"
    if None in (user, kernel):
        b.report.judge("kernel", UNKNOWN, sentence)
    else:
        b.report.judge("kernel", MET if kernel < user else MISSED, f"{sentence}: {kernel:,.4g} to {user:,.4g}")


def several(b, found):
    b.report.line("\n  2 queues of depth 128, one load thread, 2 vCPUs: IOPS under TCG, one worker and two")
    table = []
    for disk in ("/dev/nullb0", "/dev/ram0"):
        for rw in ("randread", "randwrite"):
            for engine in ENGINES[::2]:
                one, two = (iops(found.get((f"{disk}/{engine}/{flag}", 2, 128, rw), [])) for flag in LAYOUTS.values())
                table.append([f"{disk} {rw} {engine}", one and rate(one), two and rate(two), one and two and f"x{two / one:.2f}"])
                if engine == "kernel" and disk == "/dev/nullb0":
                    sentence = f"null_blk {rw}: two kernel workers do more requests than one"
                    good = one and two and two > one
                    verdict = UNKNOWN if not (one and two) else MET if good else MISSED
                    b.report.judge("kernel", verdict, sentence + (f": x{two / one:.2f}" if one and two else ""))
    b.report.table(["", "1 worker", "2 workers", ""], table, "  ")
    b.report.seed(seed.VHOST_BLK_RAM)
    b.report.seed(seed.VHOST_BLK_SSD)
