"""Tests networks on a stock kernel, in a VM.

vhost-user-net is served by /dev/vhost-net and by workers of the daemon. `vshunt serve` is on one
side of the socket. On the other is a front end that plays a guest's driver, and also the host's
side of the tap (crates/vshunt/examples/net_guest). It checks all frames in both directions. Only
the kernel's own modules are used.
"""

import os

import kernel_vm as k
import net_rig as n
import pytest
import rig as r

pytestmark = pytest.mark.timeout(1800)

PAIRS = 2

JOB = f"""
need tun
result "net: without /dev/vhost-net it says what is missing" refused "modprobe vhost_net" engine=kernel
need vhost_net
ip link set lo up

serve() {{
    rm -f /tmp/ctl
    vshunt serve --control /tmp/ctl --net type=tap,name=n0,ifname=vs0 \\
        --export type=vhost-user-net,name=c0,net=n0,socket=/tmp/c0.sock,mac=52:54:00:12:34:56,mtu=9000,"$1" \\
        2>/tmp/log &
    daemon=$!
    n=0
    while ! vshunt -c /tmp/ctl status >/tmp/status 2>&1 && [ $n -lt 900 ]; do sleep 0.1; n=$((n + 1)); done
    cat /tmp/status
}}

over() {{
    vshunt -c /tmp/ctl quit --force
    wait $daemon
    cat /tmp/log
    result "net: nothing of the tap is left" [ ! -e /sys/class/net/vs0 ]
}}

serve engine=kernel,queues={PAIRS}
result "net: each pair has a kernel worker" sh -c "vshunt -c /tmp/ctl worker list | grep -c ' kernel ' | grep -x {PAIRS}"
result "net: and each worker its queue" sh -c "vshunt -c /tmp/ctl worker list | grep ' c0:1$'"
result "net: which are threads of the daemon" sh -c "cat /proc/$daemon/task/*/comm | grep -c ^vhost- | grep -x {PAIRS}"
result "net: a queue stays on its worker" fails "each queue pair has a worker of its own" vshunt -c /tmp/ctl attach c0:0 2
result "net: attached to where it is" vshunt -c /tmp/ctl attach c0:0 1
result "net: no more workers" fails "/dev/vhost-net has no call to make them" vshunt -c /tmp/ctl worker new --kind kernel --export c0
result "net: a worker is pinned" vshunt -c /tmp/ctl worker set 2 --cpu 1
result "net: and is there" sh -c "grep '^Cpus_allowed_list:.1$' /proc/$daemon/task/*/status"
result "net: a worker with its pair is not freed" fails "has 1 queue" vshunt -c /tmp/ctl worker free 1
result "net: a network in use is not removed" fails "in use by export c0" vshunt -c /tmp/ctl net remove n0
net_guest /tmp/c0.sock vs0 {PAIRS} 7
vshunt -c /tmp/ctl status
result "net: the interface's frames are counted" sh -c "vshunt -c /tmp/ctl net list --json | grep from-guest-packets | grep -v ' 0,'"
over

serve engine=kernel,queues=1,workers=1
net_guest /tmp/c0.sock vs0 1 8
result "net: an export is added and removed" sh -c "vshunt -c /tmp/ctl export remove c0 && vshunt -c /tmp/ctl export add \\
    type=vhost-user-net,name=c1,net=n0,socket=/tmp/c1.sock,engine=kernel,queues=3,workers=per-cpu && vshunt -c /tmp/ctl worker list | grep c1/2"
result "net: no worker of the first is left" sh -c "! vshunt -c /tmp/ctl worker list | grep c0/"
over

# This kernel's taps refuse io_uring's operations that never wait (Linux before 6.4).
serve engine=user,queues={PAIRS},workers=per-queue
net_guest /tmp/c0.sock vs0 {PAIRS} 9 user
vshunt -c /tmp/ctl status
result "net: workers of the daemon: frames went both ways" sh -c "vshunt -c /tmp/ctl net list --json | grep from-guest-packets | grep -v ' 0,'"
result "net: workers of the daemon: a queue moves" vshunt -c /tmp/ctl attach c0:1 0
net_guest /tmp/c0.sock vs0 {PAIRS} 10 user packed
over
"""

FUNCTIONS = """
refused() {
    words=$1
    fails "$words" vshunt serve --no-control --net type=tap,name=n0,ifname=vs0 \\
        --export type=vhost-user-net,name=c0,net=n0,socket=/tmp/no.sock,$2
}
"""


def test_a_tap_served_by_the_kernel_and_by_the_daemon(rig, record):
    folder = k.kernel("fetch")
    modules = k.Modules(folder)
    for name in ("tun", "vhost_net"):
        r.require(modules.add(name), f"the kernel has no module {name}")
    n.build_net_guest()
    programs = {"vshunt": r.binary("vshunt"), "net_guest": n.net_guest()}
    base = k.Base(rig, folder, modules, {}, k.with_libraries(programs))
    k.Vm(rig, base, "net", FUNCTIONS + JOB).finish(float(os.environ.get("NET_S", "480")), record)
