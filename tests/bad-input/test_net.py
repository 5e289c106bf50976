"""Tests bad input about networks: wrong interfaces, numbers and names, and missing features.

As root each `vshunt serve` runs in its own network namespace, so that no interface of the machine
changes.
"""

import json
import os

import as_user
import pytest
import rig as r
from rig import message_of

# A refusal comes at once; one that takes this long hangs.
REFUSAL_S = r.WAIT_S
UPLINK, SWITCH = "type=uplink,name=u0,", "type=switch,name=n0"


class Networks:
    """Runs commands that must be refused, and checks that nothing is left behind."""

    def __init__(self, rig):
        self.rig = rig
        self.number = 0

    def serve(self, net="type=tap,name=n0,ifname=vs0", export="net=n0", before=None, more=()):
        """`vshunt serve` that is to be refused, after the command `before` in the same namespace, with `more` flags."""
        self.number += 1
        control = self.rig.dir / f"net{self.number}.ctl"
        socket = self.rig.dir / f"net{self.number}.sock"
        export = export if "type=" in export else f"type=vhost-user-net,name=c0,socket={socket},{export}"
        argv = [r.binary("vshunt"), "serve", "--net", net, "--export", export, "--control", control, *more]
        shell = f'{before}; exec "$@"' if before else 'exec "$@"'
        # Without root it can change nothing.
        own = [r.tool("unshare", "util-linux"), "--net"] if os.geteuid() == 0 else []
        done = r.run([*own, "sh", "-ec", shell, "sh", *argv], timeout_s=REFUSAL_S, check=False)
        for left in (control, socket):
            r.require(not left.exists(), f"{left.name} was left behind")
        return done


@pytest.fixture(scope="module")
def networks(rig):
    return Networks(rig)


# What `vshunt serve` refuses at once, and what it refuses after asking the kernel: words of the
# error, and arguments of Networks.serve.
REFUSED, REFUSED_BY_KERNEL = [], []
NEEDS_TUN = pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/net/tun"), reason="needs root and /dev/net/tun")


def refuse(name, *words, **what):
    REFUSED.append(pytest.param(words, what, id=name))


def of_the_kernel(name, *words, **what):
    REFUSED_BY_KERNEL.append(pytest.param(words, what, id=name))


def tap(more):
    return f"type=tap,name=n0,{more}"


refuse("without a type", "type", net="name=n0,ifname=vs0")
refuse("of a type that is not there", "bridge", net="type=bridge,name=n0,ifname=vs0")
refuse("without an interface", "ifname", net="type=tap,name=n0")
refuse("an interface and descriptors", "either", net=tap("ifname=vs0,fd=7"))
for fd in ("x", "7:", "-1", "7:7"):
    refuse(f"the descriptors {fd}", f"fd={fd}", net=tap(f"fd={fd}"))
refuse("a descriptor that is not open", "fd 99 is not open", net=tap("fd=99"))
refuse("a descriptor of two networks", "fd 9 is given twice", net=tap("fd=9"), before="exec 8</dev/null 9</dev/null",
       more=["--net", "type=tap,name=n1,fd=8:9"])
refuse("queues besides descriptors", "leave out queues", net=tap("fd=9,queues=2"))
refuse("a namespace besides descriptors", "leave it out", net=tap("fd=9,netns=red"))
refuse("a way of steering that is not there", "auto", "rss", net=tap("ifname=vs0,steering=fast"))
refuse("no namespace", "netns=", net=tap("ifname=vs0,netns="))
refuse("an address of none", "no MAC address", net=tap("ifname=vs0,address=1:2"))
refuse("an interface's name of 16 bytes", "16 bytes", "15", net=tap("ifname=sixteen-bytes-xx"))
refuse("an interface's name with a slash", "a/b", net=tap("ifname=a/b"))
refuse("a name for the kernel to complete", "tap%d", net=tap("ifname=tap%d"))
refuse("a key that is not there", "colour", net=tap("ifname=vs0,colour=red"))
for number in (0, 257):
    refuse(f"{number} queues of a tap", number, "256", net=tap(f"ifname=vs0,queues={number}"))
for number in (0, 129, 300):
    refuse(f"{number} queue pairs", number, "128", export=f"net=n0,queues={number}")
of_the_kernel("more pairs than the network has", "queues=3", "has 2", net=tap("ifname=vs0,queues=2"), export="net=n0,queues=3")
refuse("an export of none", "net=NAME", export="queues=1")
refuse("an export of one that is not there", "n9", "--net", export="net=n9")
refuse("an export of a disk", "disk", "vhost-user-net", export="disk=d0,net=n0")
refuse("a network for a disk's export", "net is of type=vhost-user-net", export="type=vhost-user-blk,name=e,net=n0,socket=/s")
refuse("a serial", "serial", export="net=n0,serial=x")
refuse("an uplink of no switch", "give net=NAME", export=f"{UPLINK}tap=n0")
refuse("an uplink without a tap", "give tap=NAME", export=f"{UPLINK}net=n0")
refuse("an uplink of a tap that is not there", "n9", "--net", net=SWITCH, export=f"{UPLINK}net=n0,tap=n9")
refuse("an uplink with an address", "mac is of type=vhost-user-net", net=SWITCH, export=f"{UPLINK}net=n0,tap=n0,mac=52:54:00:12:34:56")
refuse("a tap for a NIC", "tap is of type=uplink", export="net=n0,tap=n0")
refuse("an uplink whose tap is a switch", "n0 is a switch", net=SWITCH, export=f"{UPLINK}net=n0,tap=n0")
for mac in ("52:54:00:12:34", "52-54-00-12-34-56", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"):
    refuse(f"the address {mac}", mac, export=f"net=n0,mac={mac}")
on = {"net": SWITCH}
refuse("an uplink with a filter", "mac-filter is of type=vhost-user-net", **on, export=f"{UPLINK}net=n0,tap=n0,mac-filter=on")
refuse("a filter without an address", "give mac=", **on, export="net=n0,mac-filter=on")
for limit in (0, 8193):
    refuse(f"{limit} addresses behind a port", f"mac-limit={limit}", "8192", **on, export=f"net=n0,mac-limit={limit}")
for vlan in (0, 4095):
    refuse(f"the VLAN {vlan}", f"vlan={vlan}", "4094", **on, export=f"net=n0,vlan={vlan}")
for trunk in ("0", "4095", "9-2", "a", "1-"):
    refuse(f"the trunk {trunk}", "no list of VLANs", "1,2,10-20", **on, export=f"net=n0,trunk={trunk}")
refuse("a VLAN that is tagged and not", "vlan=5", "trunk=1-9", **on, export="net=n0,vlan=5,trunk=1-9")
refuse("a disk with a VLAN", "vlan is of type=vhost-user-net", export="type=vhost-user-blk,name=e,disk=d,vlan=5,socket=/s")
for mtu in (67, 65522):
    refuse(f"an MTU of {mtu}", mtu, "65521", export=f"net=n0,mtu={mtu}")

of_the_kernel("an interface that is no tap", "lo", "no tap", net=tap("ifname=lo"))
tun = "ip tuntap add dev vs1 mode tun"
of_the_kernel("a file that is no tap", "descriptor 9", "is no tap", net=tap("fd=9"), before="exec 9</dev/null")
of_the_kernel("a tap's file without a tap", "descriptor 9", "TUNSETIFF", net=tap("fd=9"), before="exec 9<>/dev/net/tun")
of_the_kernel("a namespace that is not there", "ip netns add vshunt-none", net=tap("ifname=vs0,netns=vshunt-none"))
of_the_kernel("a namespace that is none", "/dev/null is no network namespace", net=tap("ifname=vs0,netns=/dev/null"))
of_the_kernel("an owner who is not there", "no user vshunt-none", net=tap("ifname=vs0,owner=vshunt-none"))
of_the_kernel("a group that is not there", "no group vshunt-none", net=tap("ifname=vs0,group=vshunt-none"))
of_the_kernel("a tun", "vs1", "no tap", net=tap("ifname=vs1"), before=tun)
one = "ip tuntap add dev vs1 mode tap"
of_the_kernel("a tap with one queue for two", "vs1", "multi_queue", net=tap("ifname=vs1,queues=2"), before=one)
of_the_kernel("an uplink whose switch is a tap", "n0 is a tap", export=f"{UPLINK}net=n0,tap=n0")
for key in ("mac-limit=9", "vlan=5", "trunk=5", "isolated=on", "reserved=off", "mac-filter=off"):
    of_the_kernel(f"{key} on a tap", f"{key.split('=')[0]} is of a port of a switch", "leave it out", export=f"net=n0,{key}")
both = ["--net", "type=switch,name=s0", "--export", f"{UPLINK}net=s0,tap=n0"]
of_the_kernel("an uplink whose tap is a NIC's", "in use by export c0", more=both)
of_the_kernel("an uplink of more queues than its tap", "queues=3", "has 2", net=tap("ifname=vs0,queues=2"), export=f"{UPLINK}net=s0,tap=n0,queues=3",
       more=both[:2])
if not os.path.exists("/dev/vhost-net"):
    of_the_kernel("vhost-net is missing and asked for", "modprobe vhost_net", export="net=n0,engine=kernel")


@pytest.mark.parametrize("words, what", REFUSED)
def test_refused(networks, words, what):
    message_of(networks.serve(**what), *words)


@NEEDS_TUN
@pytest.mark.parametrize("words, what", REFUSED_BY_KERNEL)
def test_refused_by_the_kernel(networks, words, what):
    message_of(networks.serve(**what), *words)


@NEEDS_TUN
@pytest.mark.parametrize("mode, what", [(0o600, "to open /dev/net/tun"), (0o666, "to make tap vs0")], ids=("closed", "open"))
def test_no_right_to_make_a_tap(networks, mode, what):
    """The user nobody cannot make a tap, and gets an error with the reason, before udev has opened the device to all and after that."""
    with as_user.folder(networks.rig, f"user-{mode:o}") as folder:
        argv = [*as_user.words(), "--inh-caps=-all", as_user.program(folder), "serve", "--no-control"]
        argv += ["--net", "type=tap,name=n0,ifname=vs0", "--export", f"type=vhost-user-net,name=c0,net=n0,socket={folder}/no.sock"]
        done = r.run(as_user.with_device("/dev/net/tun", mode, argv), check=False, timeout_s=REFUSAL_S)
        message_of(done, f"no permission {what}", "run as root")


@NEEDS_TUN
def test_vshunt_net_steering(networks):
    """The back-end program passes `--steering` on."""
    program, control = networks.rig.dir / "vshunt-net", networks.rig.dir / "program.ctl"
    program.symlink_to(r.binary("vshunt"))
    argv = [r.tool("unshare", "util-linux"), "--net", str(program), "--socket-path", f"{networks.rig.dir}/program.sock", "--ifname", "vs0"]
    message_of(r.run([*argv, "--steering", "fast"], check=False), "auto, hash, rss, cpu")
    child = r.Child(networks.rig, "program", [*argv, "--steering", "rss", "-c", str(control)])
    ask = [r.binary("vshunt"), "-c", str(control), "net", "list", "--json"]
    r.wait_for("vshunt-net answers", lambda: r.run(ask, check=False).returncode == 0)
    r.require('"steering": "rss"' in r.run(ask).stdout, r.run(ask).stdout)
    r.require(child.stop() == 0, child.tail())


@NEEDS_TUN
def test_commands_to_a_daemon(networks):
    """A running daemon refuses bad commands, and its state stays the same."""
    control = networks.rig.dir / "nets.ctl"
    argv = [r.tool("unshare", "util-linux"), "--net", r.binary("vshunt"), "serve", "--control", str(control)]
    daemon = r.Child(networks.rig, "nets", argv)

    def cli(*arguments, check=True):
        return r.run([r.binary("vshunt"), "-c", control, *arguments], check=check, timeout_s=REFUSAL_S)

    r.wait_for("the daemon", lambda: control.exists() and cli("status", check=False).returncode == 0)
    cli("net", "add", "type=tap,name=n0,ifname=vs0,queues=4")
    for words, *arguments in (
        (["n0", "already"], "net", "add", "type=tap,name=n0,ifname=vs1"),
        (["vs0", "network n0"], "net", "add", "type=tap,name=n1,ifname=vs0"),
        (["no tap"], "net", "add", "type=tap,name=n1,ifname=lo"),
        (["over the control socket"], "net", "add", "type=tap,name=n1,fd=3"),
        (["n9"], "net", "set", "n9", "--steering", "rss"),
        (["auto, hash, rss, cpu"], "net", "set", "n0", "--steering", "fast"),
        (["n9"], "net", "remove", "n9"),
        (["n9"], "export", "add", f"type=vhost-user-net,name=c0,net=n9,socket={networks.rig.dir}/c.sock"),
    ):
        message_of(cli(*arguments, check=False), *words)
    listed = cli("net", "list").stdout.split()
    r.require("n0" in listed and "vs0" in listed and "4" in listed and "n1" not in listed, f"{listed}")
    # In the daemon's namespace.
    links = r.run(["nsenter", f"--net=/proc/{daemon.pid}/ns/net", r.tool("ip", "iproute2"), "link", "show", "vs0"]).stdout
    r.require("UP" in links, f"the tap is not up: {links}")
    cli("net", "set", "n0", "--steering", "cpu")
    r.require('"steering": "cpu"' in cli("net", "list", "--json").stdout, "it is not steered otherwise")
    if not os.path.exists("/dev/vhost-net"):
        cli("export", "add", f"type=vhost-user-net,name=c0,net=n0,socket={networks.rig.dir}/c.sock,engine=auto")
        status = cli("status", "--json").stdout
        r.require("modprobe vhost_net" in status and '"engine": "user"' in status, f"engine=auto: {status}")
        cli("export", "remove", "c0")
    cli("net", "remove", "n0")
    gone = r.run(["nsenter", f"--net=/proc/{daemon.pid}/ns/net", "ip", "link", "show", "vs0"], check=False)
    r.require(gone.returncode != 0, "the tap is still there")
    cli("net", "add", "type=tap,name=n0,ifname=vs0")
    r.require(daemon.stop() == 0, daemon.tail())


# Opens a tap so many times and continues as another program, which finds the descriptors in place
# of FDS.
WITH_TAPS = """
import fcntl, os, struct, sys
name, count, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
fds = []
for _ in range(count):
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0002 | 0x1000 | 0x4000 | 0x0100))
    os.set_inheritable(fd, True)
    fds.append(str(fd))
os.execv(argv[0], [word.replace("FDS", ":".join(fds)) for word in argv])
"""


@NEEDS_TUN
def test_a_network_of_descriptors_and_one_in_another_namespace(networks):
    """Descriptors that a parent opened, and an interface of a namespace that is not the daemon's."""
    control = networks.rig.dir / "elsewhere.ctl"
    enter = [r.tool("unshare", "util-linux"), "--net", r.tool("python3", "python3"), "-c", WITH_TAPS, "mine", "2"]
    daemon = r.Child(networks.rig, "elsewhere", [*enter, r.binary("vshunt"), "serve", "--control", str(control), "--net", "type=tap,name=n0,fd=FDS"])
    red = r.Child(networks.rig, "red", [r.tool("unshare", "util-linux"), "--net", "sleep", "infinity"])

    def cli(*arguments):
        return r.run([r.binary("vshunt"), "-c", control, *arguments], timeout_s=REFUSAL_S, check=False)

    def link(child, name):
        return r.run(["nsenter", f"--net=/proc/{child.pid}/ns/net", "ip", "-d", "link", "show", name], check=False).stdout

    r.wait_for("the daemon", lambda: control.exists() and cli("status").returncode == 0)
    own = os.readlink(f"/proc/{daemon.pid}/ns/net")
    r.wait_for("a namespace", lambda: os.readlink(f"/proc/{red.pid}/ns/net") not in (own, os.readlink("/proc/self/ns/net")))
    n1 = f"type=tap,name=n1,ifname=vs1,netns=/proc/{red.pid}/ns/net,queues=2,steering=rss,address=02:01:02:03:04:05,owner=65534,persist=on"
    added = cli("net", "add", n1)
    r.require(added.returncode == 0, added.stderr)
    nets = {net["name"]: net for net in json.loads(cli("net", "list", "--json").stdout)}
    n0, n1 = nets["n0"], nets["n1"]
    r.require((n0["ifname"], n0["open-queues"], n0["made"], n0["mtu"]) == ("mine", 2, False, 1500), f"{n0}")
    r.require((n1["steering"], n1["made"], n1["mtu"], "counters" in n1) == ("rss", False, 1500, True), f"{n1}")
    r.require(not link(daemon, "vs1"), "it is in the daemon's namespace")
    there = link(red, "vs1")
    r.require("02:01:02:03:04:05" in there and "UP" in there, there)
    message_of(cli("net", "add", f"type=tap,name=n2,ifname=vs1,netns=/proc/{red.pid}/ns/net"), "network n1", "already")
    r.require(daemon.stop() == 0, daemon.tail())
    r.require("persist on" in link(red, "vs1"), "it does not stay")
    red.stop()
