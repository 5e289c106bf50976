"""Tests frames through a tap and vhost-user-net, with `vshunt-bench net` at both ends."""

import json
import random
import time

import pytest
import rig as r

PAIRS = 2
FRAMES = 20_000
SEED = 11
# Of frames from the host, which the tap drops when they are not taken in time.
RATE = "3000"
SHAPES = {
    "split": [],
    "packed": ["--packed"],
    "no merged buffers": ["--no-mrg", "--no-event-idx", "--no-indirect"],
    "offloads": ["--offloads"],
}
SIZES = {"offloads": "60-60000"}


class Network:
    """A daemon with a NIC on a tap."""

    def __init__(self, rig, name):
        self.rig, self.name = rig, name
        self.socket, self.ifname = rig.dir / f"{name}.sock", f"vs{name}"
        self.daemon = r.Daemon(
            rig,
            *("--net", f"name=n0,type=tap,ifname={self.ifname},queues={PAIRS}"),
            *("--export", f"type=vhost-user-net,name=e0,net=n0,socket={self.socket},queues={PAIRS},workers=per-queue,engine=user"),
            name=name,
        )

    def argv(self, mode, *more):
        both = ["--peer", self.ifname, "--verify", "--quiet", "--json", "--flows", "64", "--queues", PAIRS]
        return [r.binary("vshunt-bench"), "net", "--socket", self.socket, "--mode", mode, *both, *more]

    def run(self, mode, *more):
        """A whole run; its JSON. Wrong frames are its failure."""
        return json.loads(r.run(self.argv(mode, *more)).stdout)

    def result(self, child):
        """The JSON of a run that was ended by a signal."""
        code = child.interrupt()
        text = child.output()
        r.require(code == 0, f"vshunt-bench ended with {code}: {child.tail()}")
        return json.loads(text[text.index("{\n") :])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.daemon.child.kill()

    def end(self):
        self.daemon.cli("quit")
        r.require(self.daemon.child.wait() == 0, self.daemon.child.tail())
        r.require("panicked" not in self.daemon.child.output(), self.daemon.child.tail())


def test_frames_both_ways(rig):
    with Network(rig, "a") as net:
        for name, flags in SHAPES.items():
            size = ["--size", SIZES.get(name, "60-1514")]
            done = net.run("source", "--frames", FRAMES, *flags, *size)
            far = done["peer"]
            seen = far["received"]["frames"] + far["socket_dropped"]
            r.require(done["sent"]["frames"] == far["arrived"] == seen == FRAMES, f"{name}: not all arrive: {done}")
            done = net.run("sink", "--rate", RATE, "--runtime", "1s", *flags, *size)
            r.require(done["received"]["frames"] > 0 and done["sent"]["frames"] == 0, f"{name}: {done}")
            done = net.run("echo", "--rate", RATE, "--runtime", "1s", *flags, *size)
            sent, far = done["sent"]["frames"], done["peer"]
            r.require(sent > 0 and sent == far["arrived"], f"{name}: not all that is sent back arrives: {done}")
            # Those of the last moment are not sent back.
            r.require(sent + done["no_room"] <= done["received"]["frames"], f"{name}: {done}")
        net.end()


def test_queues_move_between_workers_under_traffic(rig):
    """No frame is damaged, doubled or overtaken."""
    with Network(rig, "b") as net:
        load = r.Child(net.rig, "load-moved", net.argv("echo", "--rate", RATE, "--runtime", r.FOREVER, "--size", "60-1514"))
        workers = [0, net.daemon.worker_new(), net.daemon.worker_new()]
        chance = random.Random(SEED)
        for _ in range(20):
            net.daemon.cli("attach", f"e0:{chance.randrange(PAIRS)}", chance.choice(workers))
            time.sleep(chance.uniform(0.0, 0.1))
        r.require(load.running(), load.tail())
        done = net.result(load)
        r.require(done["sent"]["frames"] > 0 and done["sent"]["frames"] == done["peer"]["arrived"], f"{done}")
        net.end()


def packets(net):
    """Frames that came out of the tap so far. The interface outlives the daemon."""
    with open("/proc/thread-self/net/dev", encoding="ascii") as f:
        line = next(line for line in f if line.strip().startswith(f"{net.ifname}:"))
    return int(line.split(":")[1].split()[1])


def adopted(rig, name):
    """A device on a tap that exists before the daemon, and outlives it."""
    ip = r.tool("ip", "iproute2")
    r.run([ip, "tuntap", "add", "dev", f"vs{name}", "mode", "tap", "multi_queue", "vnet_hdr"])
    return Network(rig, name)


@pytest.mark.parametrize("flags", ([], ["--packed"]), ids=("split", "packed"))
def test_kill_under_traffic(rig, flags):
    """Frames continue after a kill -9, and none from the guest is missing at the other end."""
    with adopted(rig, flags[0][2:] if flags else "split") as net:
        more = ["--rate", RATE, "--runtime", r.FOREVER, "--reconnect", "120s", *flags]
        for mode in ("source", "echo"):
            load = r.Child(net.rig, f"load-killed-{mode}{''.join(flags)}", net.argv(mode, *more))
            for kill in range(2):
                moved = packets(net)
                r.wait_for(f"frames before kill {kill + 1}", lambda: packets(net) > moved)
                net.daemon.child.kill()
                net.daemon.start()
            moved = packets(net)
            r.wait_for("frames after the last kill", lambda: packets(net) > moved)
            done = net.result(load)
            # A kill while the guest connects again, its rings on already, is the same outage to it.
            r.require(1 <= done["reconnects"] <= 2 and done["peer"]["received"]["damaged"] == 0, f"{mode}: {done}")
            lost = max(0, done["peer"]["received"]["lost"] - done["peer"]["socket_dropped"])
            r.require(mode == "echo" or lost == 0, f"{lost} frames of the guest are missing: {done}")
        net.end()
