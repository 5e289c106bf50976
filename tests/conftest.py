"""Fixtures and options of the black-box tests. CONTRIBUTING.md, "Black-box tests", says how to run and write them."""

import ctypes
import os
import random
import signal
import time
from pathlib import Path

import fuse_guard
import machine
import pytest
import rig as r
from seeds import SEED

HERE = Path(__file__).resolve().parent
PR_SET_CHILD_SUBREAPER = 36

# The test of another run that started this one, which pytest names in the environment. Tests of
# that run go on meanwhile.
WITHIN = os.environ.get("PYTEST_CURRENT_TEST", "")
ALONE = ("serial", "timed", "paced")
TURN = machine.Turn()

# Marks of whole folders.
MARKS = {
    "backup": ("root",),
    "mirror": ("root",),
    "fuse": ("root",),
    "net": ("root",),
    "net-load": ("root",),
    "packages": ("root", "slow"),
    "guest": ("vm", "slow"),
    "guides": ("root", "vm", "slow"),
    "guest-kill": ("vm", "slow"),
    "vmm-kill": ("vm", "slow"),
    "ordinary": ("root", "slow"),
    "uml": ("vm",),
    "kernel": ("vm", "kernel", "slow"),
    "kernel-relay": ("vm", "kernel", "slow"),
    "kernel-net": ("vm", "kernel", "slow"),
}

# Folders that take longest, so that a run with several processes starts with them. Those with few
# long tests come before those with many short ones: a process takes its next tests while its last
# two have not ended yet. "fuse" is between those of the kernel's VMs, which compute all the time.
LONGEST = (
    *("kernel-relay", "fuse", "kernel", "net", "guest", "kernel-net", "guest-kill", "vmm-kill", "guides", "kill9"),
    *("qcow2", "backup", "packages", "snapshot", "image"),
)

# Folders whose files may run side by side. The files of the others share something: a setting of
# the kernel, a network.
SPREAD = ("backup", "bad-input", "image", "mirror", "nbd", "nbd-server", "net", "net-load", "qcow2", "snapshot")


def pytest_addoption(parser):
    group = parser.getgroup("vshunt")
    group.addoption("--lines", action="store_true", help="one line for each result, as scripts/test counts them")
    group.addoption("--kills", type=int, metavar="N", help="how often daemons are killed in tests that do so (default: theirs)")
    group.addoption("--every", action="store_true", help="every kind of qcow2 image, instead of some drawn at random")
    group.addoption("--server", metavar="PROGRAM", help="QEMU's storage daemon in vshunt's place, for the FUSE tests")
    group.addoption("--seconds", type=float, metavar="S", help="how long the tests under load run (default: theirs)")


def pytest_configure(config):
    # For test files that tests run as programs.
    os.environ["PYTHONPATH"] = str(HERE / "lib")
    if hasattr(config, "workerinput"):
        return
    # Programs that a killed worker leaves behind become children of this process, which kills them
    # at the end.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    if config.getoption("--lines"):
        config.pluginmanager.register(Lines(config), "vshunt-lines")


def _interrupted(number, _):
    raise KeyboardInterrupt(f"signal {number}")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    if hasattr(config, "workerinput"):
        return
    # Children of a killed child come up one level each time.
    for _ in range(100):
        left = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not left:
            break
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break


def group_of(item):
    """The folder of tests/ that a test lies in."""
    return item.path.relative_to(HERE).parts[0]


@pytest.hookimpl(tryfirst=True)  # before xdist puts the groups into the names
def pytest_collection_modifyitems(config, items):
    """Each folder, or each file of one in SPREAD, stays on one process (`--dist loadgroup`), and the longest come first. The
    lane `long` is left out unless `-m` or `-k` choose tests, or one is named."""
    chosen = config.option.markexpr or config.option.keyword or any("::" in argument for argument in config.args)
    if not chosen:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    for item in items:
        # scripts/test finds the end of a name in a line by it.
        assert ": " not in item.nodeid, f"{item.nodeid} has a colon and a space"
        name = group_of(item)
        place = f"{name}-{item.path.stem}" if name in SPREAD else name
        item.add_marker(pytest.mark.xdist_group(place))
        for mark in MARKS.get(group_of(item), ()):
            item.add_marker(mark)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group_of(item), len(LONGEST)))


def pytest_runtest_setup(item):
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    mark = next((name for name in ALONE if item.get_closest_marker(name)), None)
    if WITHIN and mark:
        pytest.skip(f"is marked {mark}, so it needs the machine alone, and this run is within {WITHIN.split(' ')[0]}")
    # The test that this run is within has its turn already.
    if not WITHIN:
        TURN.take(alone=mark == "serial")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown():
    yield
    TURN.end()


class Lines:
    """Prints `ok ID (S s)`, `not ok ID: WHY` or `skip ID: WHY` for each test, after the results that it recorded."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        counts = report.when == "call" or report.outcome != "passed"
        return report.outcome if counts else "", "", ""  # no dots

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        name = report.nodeid.removeprefix("tests/").split("@")[0]
        lines = [line for line in report.capstdout.splitlines() if line.startswith("# ")] if report.when == "call" else []
        if report.when == "call":
            lines += [f"{word} {name}: {r.one_line(value)}" for word, value in report.user_properties if word in ("ok", "skip")]
        if report.failed:
            lines.append(f"not ok {name}{'' if report.when == 'call' else f' ({report.when})'}: {reason(report)}")
        elif report.skipped:
            lines.append(f"skip {name}: {reason(report)}")
        elif report.when == "call":
            lines.append(f"ok {name} ({report.duration:.1f} s)")
        writer = self.config.pluginmanager.getplugin("terminalreporter")
        for line in lines:
            writer.ensure_newline()
            writer.write_line(line)
        writer.flush()


def reason(report):
    """Why a test failed or was left out, in one line."""
    if isinstance(report.longrepr, tuple):
        return r.one_line(report.longrepr[2].removeprefix("Skipped: "))
    crash = getattr(report.longrepr, "reprcrash", None)
    return r.one_line(crash.message if crash else str(report.longrepr)).removeprefix("rig.Failed: ")


@pytest.fixture(scope="module")
def rig(request):
    """A folder of the module's own, and the programs that its tests start there. Kept when one of them failed."""
    before = request.session.testsfailed
    made = r.Rig(f"{request.path.parent.name}-{request.path.stem.removeprefix('test_')}", signals=False)
    yield made
    made.end(keep=request.session.testsfailed > before)


@pytest.fixture(autouse=True)
def _ended_after_failure(request):
    """Kills the programs that a failed test started itself."""
    if "rig" not in request.fixturenames:
        yield
        return
    made, failed = request.getfixturevalue("rig"), request.session.testsfailed
    started = len(made.children)
    yield
    if request.session.testsfailed > failed:
        for child in made.children[started:]:
            child.kill()


@pytest.fixture(scope="module")
def memory(rig):
    """A folder in memory, or on disk if the machine has none in memory."""
    return rig.memory_dir()


@pytest.fixture
def record(request):
    """Records one of many results of a program that the test starts: `record("ok", NAME)` or
    `record("skip", WHY)`. With --lines each has a line of its own, so that it is counted."""
    return lambda word, text: request.node.user_properties.append((word, text))


@pytest.fixture
def rand():
    """Random numbers of VSHUNT_SEED (1), from the start for each test."""
    return random.Random(SEED)


@pytest.fixture(scope="session")
def clock():
    """A mount namespace of this process's own, and the clock of the guardian in it. See tests/lib/fuse_guard.py."""
    guardian = fuse_guard.Guardian()
    yield guardian.clock
    guardian.end()


# What a guarded test may take: over it, it hangs. The longest takes some ten seconds where nothing
# else runs.
GUARDED_S = 180.0


@pytest.fixture
def guarded(request, clock):
    """The test's FUSE connections are aborted when it is over its time, and the mounts that it made go if it fails. Call it
    with the seconds that the test may take more."""
    failed, before = request.session.testsfailed, {m[1] for m in fuse_guard.fuse_mounts()}
    limit_s = [GUARDED_S]

    def longer(seconds):
        limit_s[0] += seconds
        clock.put(limit=time.monotonic() + limit_s[0])

    clock.put(aborts=0)
    longer(0.0)
    yield longer
    aborts = clock.get()[1]
    clock.put(limit=0.0)
    if request.session.testsfailed > failed or aborts:
        fuse_guard.unmount({m[1] for m in fuse_guard.fuse_mounts()} - before)
    r.require(not aborts, f"over its {limit_s[0]:g} s: the connections were aborted")


@pytest.fixture
def marks(rig):
    """For tests of marked images: marks are extended attributes."""
    probe = rig.dir / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.vshunt.probe", b"x")
    except OSError as e:
        raise r.Skipped(f"the file system of {rig.dir} has no extended attributes ({e})") from e
    finally:
        probe.unlink()
