"""Frames by `vshunt-bench net` at both ends: whole, once and in order, through a tap and vhost-user-net, and between guests of a switch.

With rings of every kind, while queues move between workers, and across a kill -9. As root, in a network namespace.
"""

import namespaces
import net_rig as n
import pytest


@pytest.fixture(scope="module", autouse=True)
def _network():
    n.require_taps()
    with namespaces.OwnNetwork():
        yield
