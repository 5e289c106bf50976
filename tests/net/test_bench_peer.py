"""Tests that DPDK, with which the bench compares, starts in the bench's network namespace and forwards there."""

import json
import sys

import pytest
import rig as r

sys.path.append(str(r.ROOT / "bench"))
import net as bench  # noqa: E402

FRAMES = 2000


@pytest.mark.parametrize("pairs", [1, 2])
def test_dpdk_forwards_between_a_guest_and_a_tap(rig, testpmd, pairs):
    with bench.namespace() as inside:
        socket = rig.dir / f"dpdk{pairs}.sock"
        taker = bench.dpdk([testpmd], pairs)
        dpdk = r.Child(rig, f"dpdk{pairs}", [*inside, *(word.replace("{sock}", str(socket)) for word in taker.argv)])
        r.wait_for("DPDK's socket", lambda: socket.exists() or ended(dpdk))
        argv = [*inside, r.binary("vshunt-bench"), "net", "--socket", socket, "--queues", pairs, "--peer", taker.ifname, *taker.guest]
        done = json.loads(r.run([*argv, "--mode", "source", "--frames", FRAMES, "--size", 64, "--flows", bench.FLOWS, "--quiet", "--json"]).stdout)
        r.require(done["sent"]["frames"] == FRAMES, f"{done}: {dpdk.tail()}")
        # DPDK drops what a tap does not take at once.
        r.require(done["peer"]["arrived"] > 0, f"{done}: {dpdk.tail()}")
        dpdk.kill()


def ended(child):
    if not child.running():
        raise r.Failed(f"testpmd ended with {child.process.returncode}: {child.tail()}")
    return False
