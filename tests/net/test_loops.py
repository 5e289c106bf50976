"""Tests uplinks of a switch: VLANs, and loops in the network behind them."""


import net_frames as f
import net_rig as n
import rig as r
from net_ports import ALL, A, B, C, D, Net, Tagged, got, mac_of, tag, text

# Where the switch's loop probes go.
PROBES = bytes.fromhex("037673686c70")


def settled(net, host, nic):
    """Waits until all earlier frames of the host have passed."""
    frame = f.frame(net.mark(), 200, A, C)
    host.send(tag(frame, 5))
    r.require(got(nic, "the host's frame") == frame, "another frame came")


def test_uplink_with_vlans(rig):
    """An uplink is a port like others: VLANs, isolation, lengths. The host's address belongs to the host."""
    with Net(rig, "uplink", "vlan=5,isolated=on", "vlan=6,isolated=on", "vlan=5,mtu=9000", uplinks=["trunk=5,vlan=6,mtu=1500"]) as net:
        a, b, large = net.all_nics()
        host = Tagged("vs0")
        for nic, mac, form in ((a, A, lambda x: tag(x, 5)), (b, B, lambda x: x)):
            for length in (60, 1514):
                frame = f.frame(1, length, ALL, mac)
                nic.transmit(frame)
                seen = host.next(mac)
                r.require(seen == form(frame), f"{length} bytes from {text(mac)}: {seen[:30].hex()}")
            back = f.frame(2, 200, mac, C)
            host.send(form(back))
            r.require(got(nic, "the host's frame") == back, "another frame came")
        got(large, "VLAN 5's first frame")
        net.refused("vlan", 1, "u0", lambda: (host.send(tag(f.frame(3, 200, ALL, C), 7)), settled(net, host, a)))
        net.refused("reserved", 1, "u0", lambda: (host.send(f.frame(3, 200, bytes.fromhex("0180c2000000"), C)), settled(net, host, a)))
        large.transmit(f.frame(1, 60, A, D))
        got(a, "a frame within VLAN 5")
        net.refused("over-mtu", 1, "c2", lambda: large.transmit(f.frame(3, 1515, C, D)))
        net.refused("foreign-source", 1, "c1", lambda: b.transmit(f.frame(3, 200, ALL, mac_of("vs0"))))
        # An MTU that changes elsewhere is seen after a while.
        n.ip("link", "set", "vs0", "mtu", "9000")
        r.wait_for("the uplink's new MTU", lambda: net.port("u0")["mtu"] == 9000)
        host.close()


def test_two_uplinks_that_make_a_loop(rig):
    """One uplink is blocked, logged once and counted. It is free again when the loop is gone."""
    with Net(rig, "loop", "", uplinks=["", ""]) as net:
        n.ip("link", "add", "br0", "type", "bridge")
        try:
            for k in range(2):
                n.ip("link", "set", f"vs{k}", "master", "br0")
            n.ip("link", "set", "br0", "up")
            r.wait_for("a blocked uplink", lambda: net.port("u1")["state"] == "blocked")
            r.wait_for("a word of it", lambda: "makes a loop" in net.child.output())
            nic, host = net.nic(0), f.Host("br0")
            nic.transmit(f.frame(1, 200, ALL, A))
            r.require(host.receive(A) is not None, "the guest's frame does not come by the other uplink")
            # Nothing goes round: a frame to all comes out once.
            r.require(host.receive(A, wait_s=0.5) is None, "the frame comes again")
            host.send(f.frame(2, 200, A, C))
            r.require(got(nic, "the host's frame") == f.frame(2, 200, A, C), "another frame came")
            ports = net.port("u0"), net.port("u1")
            r.require((ports[0]["state"], ports[0]["loops"], ports[1]["loops"]) == ("forwarding", 0, 1), f"{ports}")
            r.require("blocked" in net.cli("status").stdout, net.cli("status").stdout)
            n.ip("link", "set", "vs1", "nomaster")
            r.wait_for("an uplink that is free", lambda: net.port("u1")["state"] == "forwarding")
            words = net.child.output().count("makes a loop")
            r.require(words == 1, f"it is said {words} times: {net.child.tail()}")
            host.close()
        finally:
            n.ip("link", "del", "br0")


def test_a_loop_in_one_vlan_of_many(rig):
    """Probes visit the VLANs in turn, and the VLAN with the loop is visited in each round."""
    last, turn = 200, 64
    with Net(rig, "one-vlan", uplinks=[f"trunk=1-{last}"] * 2) as net:
        one, two = Tagged("vs0"), Tagged("vs1")
        # The network between both passes on VLAN 200 alone, one way.
        seen, counts = [], []
        while len(counts) < 5:
            probe = one.next(PROBES, at=0)
            r.require(probe[12:14] == b"\x81\x00", f"a probe without a tag: {probe[:20].hex()}")
            vlan = int.from_bytes(probe[14:16], "big")
            seen.append(vlan)
            r.require(len(seen) < 5 * last, f"no probe in VLAN {last}, or too few: {counts} of {len(seen)}")
            if vlan == last:
                two.send(probe)
                counts.append(len(seen))
        r.require(set(seen) == set(range(1, last + 1)), f"no probe in VLANs {set(range(1, last + 1)) - set(seen)}")
        # The first one may be part of its turn.
        between = [after - before for before, after in zip(counts, counts[1:])]
        r.require(all(count <= turn + 1 for count in between), f"probes until VLAN {last} has the next one: {between}")
        r.wait_for("a blocked uplink", lambda: net.port("u1")["state"] == "blocked")
        ports = net.port("u0"), net.port("u1")
        r.require((ports[0]["loops"], ports[1]["loops"]) == (0, 1), f"{ports}")
        one.close()
        two.close()


def test_the_host_while_two_uplinks_make_a_loop(rig):
    """The guest reaches each address of the host, and the host reaches the guest."""
    with Net(rig, "host", "", uplinks=["", ""]) as net:
        try:
            for k in range(2):
                n.ip("link", "add", f"br{k}", "address", f"02:00:00:00:00:f{k}", "type", "bridge")
                n.ip("link", "set", f"vs{k}", "master", f"br{k}")
                n.ip("link", "set", f"br{k}", "up")
            # Those of both bridges and both taps; nobody has sent a frame yet.
            r.wait_for("the host's addresses", lambda: net.status()["nets"][0]["addresses"] == 4)
            n.ip("link", "add", "vx0", "type", "veth", "peer", "name", "vx1")
            for k in range(2):
                n.ip("link", "set", f"vx{k}", "master", f"br{k}", "up")
            r.wait_for("a blocked uplink", lambda: net.port("u1")["state"] == "blocked")
            nic, hosts = net.nic(0), [f.Host(f"br{k}") for k in range(2)]
            # A tap's own address is its bridge's, too. Those of br1 are behind the uplink that is
            # blocked.
            addresses = [(k, mac_of(f"{name}{k}")) for k in range(2) for name in ("br", "vs")]
            for number, (k, address) in enumerate(addresses):
                # The host begins: frames that went round before the loop was found have told its
                # bridges wrong places.
                frame = f.frame(10 + number, 200, ALL if number == 0 else A, address)
                hosts[k].send(frame)
                r.require(got(nic, f"the host's frame from {text(address)}") == frame, "another frame came")
                frame = f.frame(number, 200, address, A)
                nic.transmit(frame)
                r.require(hosts[k].receive(A) == frame, f"the guest's frame to {text(address)} does not come")
                net.refused("foreign-source", 1, "c0", lambda source=address: nic.transmit(f.frame(9, 200, ALL, source)))
            # To all: once to the guest, and what comes to the blocked uplink is counted.
            for k in range(2):
                before = net.drops("u1").get("loop", 0)
                frame = f.frame(net.mark(), 200, ALL, addresses[2 * k][1])
                hosts[k].send(frame)
                r.require(got(nic, "the host's frame to all") == frame, "it comes twice, or another one comes")
                r.wait_for("a count of it", lambda b=before: net.drops("u1").get("loop", 0) > b)
            frame = f.frame(net.mark(), 200, A, addresses[0][1])
            hosts[0].send(frame)
            r.require(got(nic, "the host's next frame") == frame, "a frame to all came twice")
            r.require(net.port("u1")["state"] == "blocked", "the loop is not there any more")
            for each in hosts:
                each.close()
        finally:
            for link in ("vx0", "br0", "br1"):
                r.run([r.tool("ip", "iproute2"), "link", "del", link], check=False)
