"""Tests a switch under load: frames arrive whole, once and in order, while queues move.

The guests have rings of each kind. A guest that takes no frames, or has ended, does not delay
others.
"""

import json
import random
import time

import net_guests as s
import rig as r

FRAMES = 20_000
SEED = 12
# Options of the sender and of the receiver.
SHAPES = {
    "split": ([], []),
    "packed": (["--packed"], ["--packed"]),
    "packed to split without merged buffers": (["--packed"], ["--no-mrg", "--no-event-idx", "--no-indirect"]),
    "offloads": (["--offloads", "--size", "60-60000"], ["--offloads", "--size", "60-60000"]),
    "offloads to a guest that has none": (["--offloads", "--size", "60-1514"], ["--size", "60-1514"]),
}


def test_frames_from_guest_to_guest(rig):
    for name, (sender, receiver) in SHAPES.items():
        switch = s.Switch(rig, "sw")
        sink = switch.load(1, "sink", *receiver)
        switch.ready(1, sink)
        sent = s.result(switch.load(0, "source", "--frames", str(FRAMES), *sender), interrupt=False)["sent"]["frames"]
        done = s.result(sink)
        got, check = done["received"], done["check"]
        dropped = sum(switch.counters(0)[2].values())
        r.require(sent == FRAMES, f"{name}: {sent} frames sent")
        # What the guest had when it was told to end, whether it has looked at all of it or not.
        r.require(switch.counters(1)[0] + dropped >= FRAMES and check["damaged"] == 0, f"{name}: {done}, {dropped} dropped")
        r.require(got["frames"] > 0, f"{name}: nothing arrives")
        switch.end()


def test_queues_move_between_workers_under_traffic(rig):
    """Those of both guests, on a switch that knows both addresses."""
    switch = s.Switch(rig, "sm")
    echo = switch.load(1, "echo")
    switch.ready(1, echo)
    source = switch.load(0, "source", "--rate", "20k")
    workers = [0, switch.daemon.worker_new(), switch.daemon.worker_new()]
    chance = random.Random(SEED)
    for _ in range(40):
        switch.daemon.cli("attach", f"e{chance.randrange(2)}:{chance.randrange(s.PAIRS)}", chance.choice(workers))
        time.sleep(chance.uniform(0.0, 0.05))
    before = switch.counters(1)[0]
    r.wait_for("frames after the moves", lambda: switch.counters(1)[0] > before + 100)
    nets = json.loads(switch.daemon.cli("net", "list", "--json").stdout)
    r.require(nets[0]["addresses"] == 2, f"{nets}")
    sent, done = s.result(source)["sent"]["frames"], s.result(echo)
    got, check = done["received"], done["check"]
    r.require(check["damaged"] == 0 and check["late"] == 0, f"{done}")
    lost = sum(switch.counters(0)[2].values())
    r.require(switch.counters(1)[0] + lost >= sent, f"{got['frames']} of {sent} frames, {lost} dropped")
    switch.end()


def test_a_guest_that_takes_nothing_holds_nobody_up(rig):
    """One guest of three is stopped, then killed. Frames for it do not delay others."""
    switch = s.Switch(rig, "sh", guests=3)
    dead, sink = switch.load(1, "sink"), switch.load(2, "sink")
    switch.ready(1, dead)
    switch.ready(2, sink)
    dead.suspend()
    # The switch does not know where its address is: all frames go to both.
    source = switch.load(0, "source")
    for step in ("stopped", "killed"):
        before = switch.counters(2)[0]
        r.wait_for(f"frames for the third while the second is {step}", lambda: switch.counters(2)[0] > before + 5000)
        if step == "stopped":
            # All that waits for it is fetched back for this.
            switch.daemon.cli("attach", "e0:0", "0")
            dead.kill()
    check = s.result(sink)["check"]
    r.require(check["damaged"] == 0 and check["late"] == 0, f"{check}")
    s.result(source)
    switch.end()


def test_kill_under_traffic(rig):
    """Guests continue with the next daemon after a kill -9."""
    switch = s.Switch(rig, "sk")
    sink = switch.load(1, "sink", "--reconnect", "120s")
    switch.ready(1, sink)
    source = switch.load(0, "source", "--reconnect", "120s", "--rate", "20k")
    for _ in range(2):
        r.wait_for("frames", lambda: switch.counters(1)[0] > 100)
        switch.daemon.child.kill()
        switch.daemon.start()
    r.wait_for("frames after the last kill", lambda: switch.counters(1)[0] > 100)
    done, got = s.result(source), s.result(sink)
    r.require(done["reconnects"] and got["reconnects"] and got["check"]["damaged"] == 0, f"{done} {got}")
    switch.end()


def test_wrong_options_are_refused(rig):
    switch = s.Switch(rig, "se")
    for words, arguments in (
        (["ifname", "type=tap"], ("net", "add", "type=switch,name=s1,ifname=vs9")),
        (["e0"], ("net", "remove", "s0")),
        (["engine=kernel"], ("export", "add", f"type=vhost-user-net,name=e9,net=s0,socket={rig.dir}/e9.sock,engine=kernel")),
        (["switch"], ("net", "set", "s0", "--steering", "rss")),
    ):
        r.message_of(switch.daemon.cli(*arguments, check=False), *words)
    switch.daemon.cli("export", "remove", "e1")
    switch.daemon.cli("export", "remove", "e0")
    switch.daemon.cli("net", "remove", "s0")
    switch.end()
