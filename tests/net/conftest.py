"""Networks served by workers: vhost-user-net on a tap or on a switch, with front ends of every kind.

The front ends are net_guest (crates/vshunt/examples), which plays both a guest's driver and the other side of the tap; net_peer, the
same in Python, for input that no correct driver sends; testpmd; and real guests. As root. Each file has a network namespace of its own.
"""

import namespaces
import net_rig as n
import pytest
import vm

# Fixtures of the session are set up first, where the machine's own network is: they may download.


@pytest.fixture(scope="session")
def net_guest():
    n.require_taps()
    n.build_net_guest()


@pytest.fixture(scope="session")
def testpmd():
    return n.testpmd()


@pytest.fixture(scope="session")
def guest_image():
    return vm.image()


@pytest.fixture(scope="module", autouse=True)
def _network():
    n.require_taps()
    with namespaces.OwnNetwork():
        yield
