"""Tests frames in both directions while queues move, pairs change and the daemon is killed."""

import random
import time

import net_load as t
import pytest
import rig as r

pytestmark = pytest.mark.usefixtures("net_guest")

MOVES, SWITCHES, KILLS = 60, 24, 8
KINDS = {"split": [], "packed": ["packed"], "plain": ["plain"]}


@pytest.mark.parametrize("kind", KINDS)
def test_moves_of_queues(rig, kind):
    """Queues are moved, workers come and go: nothing is lost."""
    with t.daemon(rig, f"moved-{kind}", workers="2") as daemon:
        load = t.Load(rig, daemon, f"moved-{kind}", *KINDS[kind])
        chance = random.Random(t.SEED)
        first = sorted({q["worker"] for q in daemon.queues().values()})
        more = [daemon.worker_new() for _ in range(2)]
        for move in range(MOVES):
            daemon.cli("attach", f"c0:{chance.randrange(t.PAIRS)}", chance.choice([*first, *more]))
            if move % 15 == 14:
                at = {q["worker"] for q in daemon.queues().values()}
                for worker in [w for w in more if w not in at]:
                    daemon.cli("worker", "free", worker)
                    more.remove(worker)
                more.append(daemon.worker_new())
        load.progress()
        to, back = load.end()
        drops = daemon.drops()
        r.require(to[1] == back[1] == 0 and not drops, f"lost of frames to the guest {to}, from it {back}; counted {drops}")
        daemon.end()
        rig.say(f"{kind}: {MOVES} moves, {to[0]} frames to the guest, {back[0]} from it")


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_switched(rig, kind):
    """Pairs are switched off and on, and lost frames are counted."""
    with t.daemon(rig, f"switched-{kind}") as daemon:
        load = t.Load(rig, daemon, f"switched-{kind}", *KINDS[kind])
        chance = random.Random(t.SEED)
        off, detached = set(), 0
        for _ in range(SWITCHES):
            pair = chance.randrange(1, t.PAIRS)
            detached += pair not in off
            load.switch(pair, pair in off)
            off ^= {pair}
            time.sleep(chance.uniform(0, 0.05))
        for pair in sorted(off):
            load.switch(pair, True)
        load.progress()
        # Stopping the rings, which counts what waits for buffers, comes after the last frame.
        to, back = load.end()
        drops = daemon.drops()
        rig.say(f"{kind}: {SWITCHES} switches, {to[0]} frames to the guest, {to[1]} lost; counted: {drops}")
        r.require(back[1] == 0, f"{back[1]} of {back[0]} frames from the guest are lost")
        counted = sum(drops.values())
        # What comes between our last look into a queue and its detaching is thrown away by the
        # kernel, which does not say so: each time no more than are under way.
        uncounted = to[1] - counted
        r.require(0 <= uncounted <= detached * t.WINDOW, f"{to[1]} of {to[0]} frames to the guest are lost, and {counted} counted: {drops}")
        daemon.end()


@pytest.mark.parametrize("kind", KINDS)
def test_kills(rig, kind):
    """kill -9, again and again. The tap is not the daemon's own, and stays."""
    with t.daemon(rig, f"killed-{kind}", kept=True) as daemon:
        load = t.Load(rig, daemon, f"killed-{kind}", *KINDS[kind])
        chance = random.Random(t.SEED)
        for _ in range(KILLS):
            time.sleep(chance.uniform(0, 0.2))
            daemon.child.kill()
            time.sleep(chance.uniform(0, 0.1))
            daemon.start()
            load.progress()
        to, back = load.end()
        r.require(f"# {KILLS} reconnects" in load.child.output(), load.child.tail())
        drops = daemon.drops()
        rig.say(f"{kind}: {KILLS} kills, to the guest {to[0]} frames and {to[1]} lost, from it {back[0]} and {back[1]} lost; {drops}")
        r.require(daemon.child.stop() == 0, daemon.child.tail())
