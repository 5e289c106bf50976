"""The FUSE export, asked by those who use files: tools, system calls, loop devices, QEMU, fio; killed, misused, ended.

Each test runs for each transport: `dev`, and `io_uring` where the kernel's parameter `enable_uring` can be set. The mark
`transports` names others; `any` leaves the choice to the test. `-k dev` selects one. As root.
`--server PROGRAM` puts QEMU's storage daemon in vshunt's place, to try the tests themselves.
"""

import contextlib

import fuse_guard
import fuse_mount as m
import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "transports(...): the transports of a FUSE test: dev, io_uring, any")


def pytest_generate_tests(metafunc):
    if "transport" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("transports")
        metafunc.parametrize("transport", mark.args if mark else ("dev", "io_uring"), indirect=True, scope="module")


# A fixture, since pytest 7 sets up direct parameters again for each test that has more of them.
@pytest.fixture(scope="module")
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def suite(request, rig, clock, transport):
    server = request.config.getoption("--server")
    if server and transport == "io_uring":
        pytest.skip("the peer has no io_uring")
    made = m.Suite(rig, clock, server, None if transport == "any" else transport)
    with fuse_guard.Uring(clock, "Y") if transport == "io_uring" else contextlib.nullcontext():
        yield made
        made.end()


@pytest.fixture(autouse=True)
def _guarded(guarded):
    """All of them can hang."""


@pytest.fixture
def fresh_after_failure(request):
    """Call it with an m.Fixture: it makes its mount again after a test that failed."""
    failed, used = request.session.testsfailed, []
    yield used.append
    if request.session.testsfailed > failed:
        for fixture in used:
            fixture.drop()
