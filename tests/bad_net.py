"""Bad input about networks: interfaces, numbers and names that are wrong, and a machine that lacks something.

Each `vshunt serve` in a network namespace of its own, so that no interface of the machine is touched.
"""

import os

import rig as r
from rig import message_of

REFUSAL_S = r.WAIT_S


class Networks:
    """What a user gets wrong; nothing is left behind."""

    def __init__(self, rig):
        self.rig = rig
        self.number = 0

    def serve(self, net="type=tap,name=n0,ifname=vs0", export="net=n0", before=None):
        """`vshunt serve` that is to be refused, after the command `before` in the same namespace."""
        self.number += 1
        control = self.rig.dir / f"net{self.number}.ctl"
        socket = self.rig.dir / f"net{self.number}.sock"
        export = export if "type=" in export else f"type=vhost-user-net,name=c0,socket={socket},{export}"
        argv = [r.binary("vshunt"), "serve", "--net", net, "--export", export, "--control", control]
        shell = f'{before}; exec "$@"' if before else 'exec "$@"'
        done = r.run([r.tool("unshare", "util-linux"), "--net", "sh", "-ec", shell, "sh", *argv], timeout_s=REFUSAL_S, check=False)
        for left in (control, socket):
            r.require(not left.exists(), f"{left.name} was left behind")
        return done

    def tests(self):
        def refuse(name, *words, **what):
            self.rig.test(f"bad input: network: {name}", lambda: message_of(self.serve(**what), *words))

        def tap(more):
            return f"type=tap,name=n0,{more}"

        refuse("without a type", "type", net="name=n0,ifname=vs0")
        refuse("of a type that is not there", "bridge", net="type=bridge,name=n0,ifname=vs0")
        refuse("without an interface", "ifname", net="type=tap,name=n0")
        refuse("an interface's name of 16 bytes", "16 bytes", "15", net=tap("ifname=sixteen-bytes-xx"))
        refuse("an interface's name with a slash", "a/b", net=tap("ifname=a/b"))
        refuse("a name for the kernel to complete", "tap%d", net=tap("ifname=tap%d"))
        refuse("a key that is not there", "colour", net=tap("ifname=vs0,colour=red"))
        for number in (0, 257):
            refuse(f"{number} queues of a tap", number, "256", net=tap(f"ifname=vs0,queues={number}"))
        for number in (0, 129, 300):
            refuse(f"{number} queue pairs", number, "128", export=f"net=n0,queues={number}")
        refuse("more pairs than the network has", "queues=3", "has 2", net=tap("ifname=vs0,queues=2"), export="net=n0,queues=3")
        refuse("an export of none", "net=NAME", export="queues=1")
        refuse("an export of one that is not there", "n9", "--net", export="net=n9")
        refuse("an export of a disk", "disk", "vhost-user-net", export="disk=d0,net=n0")
        refuse("a network for a disk's export", "net is of type=vhost-user-net", export="type=vhost-user-blk,name=e,net=n0,socket=/s")
        refuse("a serial", "serial", export="net=n0,serial=x")
        for mac in ("52:54:00:12:34", "52-54-00-12-34-56", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00"):
            refuse(f"the address {mac}", mac, export=f"net=n0,mac={mac}")
        for mtu in (67, 65522):
            refuse(f"an MTU of {mtu}", mtu, "65521", export=f"net=n0,mtu={mtu}")
        refuse("the user engine, which is not there yet", "engine=kernel", export="net=n0,engine=user")
        if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
            self.rig.line("skip bad input: interfaces that are no taps, in use, or of one queue: needs root and /dev/net/tun")
            return
        self.interfaces(refuse, tap)

    def interfaces(self, refuse, tap):
        """What the kernel says no to."""
        refuse("an interface that is no tap", "lo", "no tap", net=tap("ifname=lo"))
        tun = "ip tuntap add dev vs1 mode tun"
        refuse("a tun", "vs1", "no tap", net=tap("ifname=vs1"), before=tun)
        one = "ip tuntap add dev vs1 mode tap"
        refuse("a tap with one queue for two", "vs1", "multi_queue", net=tap("ifname=vs1,queues=2"), before=one)
        if not os.path.exists("/dev/vhost-net"):
            refuse("vhost-net is missing", "vhost_net", "modprobe")
            refuse("vhost-net is missing and asked for", "modprobe vhost_net", export="net=n0,engine=kernel")
            refuse("vhost-net is missing and would be taken", "modprobe vhost_net", export="net=n0,engine=auto")
        self.rig.test("bad input: network: no right to make a tap", self.no_right)
        self.rig.test("bad input: network: commands to a daemon", self.commands)

    def no_right(self):
        """As nobody."""
        setpriv = r.tool("setpriv", "util-linux")
        argv = [setpriv, "--reuid", "65534", "--clear-groups", "--inh-caps=-all", r.binary("vshunt"), "serve", "--no-control"]
        argv += ["--net", "type=tap,name=n0,ifname=vs0", "--export", "type=vhost-user-net,name=c0,net=n0,socket=/tmp/no.sock"]
        # The program may lie where nobody else may look.
        done = r.run(argv, check=False, timeout_s=REFUSAL_S)
        if "setpriv" in done.stderr:
            raise r.Skipped(f"the program cannot be run by another user: {done.stderr.strip()}")
        message_of(done, "no permission", "run as root")

    def commands(self):
        """What is asked of a daemon that runs, and what it has afterwards."""
        control = self.rig.dir / "nets.ctl"
        argv = [r.tool("unshare", "util-linux"), "--net", r.binary("vshunt"), "serve", "--control", str(control)]
        daemon = r.Child(self.rig, "nets", argv)

        def cli(*arguments, check=True):
            return r.run([r.binary("vshunt"), "-c", control, *arguments], check=check, timeout_s=REFUSAL_S)

        r.wait_for("the daemon", lambda: control.exists() and cli("status", check=False).returncode == 0)
        cli("net", "add", "type=tap,name=n0,ifname=vs0,queues=4")
        for words, *arguments in (
            (["n0", "already"], "net", "add", "type=tap,name=n0,ifname=vs1"),
            (["vs0", "network n0"], "net", "add", "type=tap,name=n1,ifname=vs0"),
            (["no tap"], "net", "add", "type=tap,name=n1,ifname=lo"),
            (["n9"], "net", "remove", "n9"),
            (["n9"], "export", "add", f"type=vhost-user-net,name=c0,net=n9,socket={self.rig.dir}/c.sock"),
        ):
            message_of(cli(*arguments, check=False), *words)
        listed = cli("net", "list").stdout.split()
        r.require("n0" in listed and "vs0" in listed and "4" in listed and "n1" not in listed, f"{listed}")
        # In the daemon's namespace.
        links = r.run(["nsenter", f"--net=/proc/{daemon.pid}/ns/net", r.tool("ip", "iproute2"), "link", "show", "vs0"]).stdout
        r.require("UP" in links, f"the tap is not up: {links}")
        cli("net", "remove", "n0")
        gone = r.run(["nsenter", f"--net=/proc/{daemon.pid}/ns/net", "ip", "link", "show", "vs0"], check=False)
        r.require(gone.returncode != 0, "the tap is still there")
        cli("net", "add", "type=tap,name=n0,ifname=vs0")
        r.require(daemon.stop() == 0, daemon.tail())
