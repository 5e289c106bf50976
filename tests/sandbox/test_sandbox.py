"""Tests each mode of the sandbox with a system call that is not allowed.

No thread of the daemon makes such a call by itself. So a library that is loaded into the daemon
makes one: personality(2), which only reads here, on each thread that accepts a connection. Those
are the threads of the control socket and of the front end.
"""

import json
import os
import re
import signal
import subprocess
import time

import pytest
import rig as r

SIZE = 64 << 20
# Numbers of personality(2).
CALLS = {"x86_64": 135, "aarch64": 92}
EPERM = 1

LIBRARY = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags)
{
	long connection = syscall(SYS_accept4, fd, address, length, flags);
	int error = errno;

	if (connection >= 0) {
		long answer = syscall(SYS_personality, 0xffffffffUL);
		dprintf(2, "probe: %s\n", answer >= 0 ? "allowed" : errno == EPERM ? "EPERM" : "?");
	}
	errno = error;
	return connection;
}
"""

# A program whose own filter has the kernel log the call: whether there is such a log, and whether
# it can be read.
LOGGED = r"""
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_personality, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_LOG),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(code[0]), code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program))
		return 1;
	return syscall(SYS_personality, 0xffffffffUL) < 0;
}
"""


def built(rig, name, text, *flags):
    """A program or library made of C."""
    source = rig.dir / f"{name}.c"
    source.write_text(text)
    r.run([r.tool("cc", "gcc"), "-O1", "-Wall", "-Werror", *flags, "-o", rig.dir / name, source])
    return rig.dir / name


def call():
    """The number of the system call that the library makes."""
    machine = os.uname().machine
    if machine not in CALLS:
        raise r.Skipped(f"the number of personality(2) on {machine} is not known here")
    return CALLS[machine]


class Probed(r.Daemon):
    """A daemon with one disk in memory, into which the library is loaded."""

    def __init__(self, rig, mode, library):
        self.socket, self.library = rig.dir / f"{mode}.sock", library
        super().__init__(
            rig,
            *("--sandbox", mode, "--disk", f"name=d0,format=ram,size={SIZE}"),
            *("--export", f"type=vhost-user-blk,name=vm0,disk=d0,socket={self.socket}"),
            name=mode,
        )

    def start(self):
        if self.arguments[0] != "env":
            self.arguments = ["env", f"LD_PRELOAD={self.library}", *self.arguments]
        super().start()

    def sandbox(self):
        """The result of `query-sandbox`."""
        return json.loads(self.cli("qmp", "query-sandbox").stdout)

    def serves(self):
        """A guest's load is verified."""
        load = ["blk", "--socket", self.socket, "--rw", "randrw", "--verify", "--bs", "4k", "--ios", "5000", "--quiet"]
        r.run([r.binary("vshunt-bench"), *load])

    def answers(self):
        """How the call ended, each time."""
        return re.findall(r"^probe: (.+)$", self.child.output(), re.MULTILINE)

    def lines(self):
        """The daemon's own lines about system calls that it may not make."""
        return re.findall(r"^vshunt: sandbox: a (\S+) thread made system call (\d+), which it may not: (.+);", self.child.output(), re.MULTILINE)


class Log:
    """The kernel's log from now on."""

    def __init__(self):
        try:
            self.file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self.file, 0, os.SEEK_END)
        except OSError as e:
            raise r.Skipped(f"the kernel's log cannot be read: {e}") from e
        self.text = ""

    def has(self, pid, number):
        """Whether a filter's line about this call of a process has come."""
        while True:
            try:
                self.text += os.read(self.file, 1 << 14).decode(errors="replace")
            except BlockingIOError:
                return re.search(rf"type=1326 .*\bpid={pid} .*\bsyscall={number} ", self.text) is not None
            except BrokenPipeError:
                # Lines were lost; the next ones follow.
                pass


def logs(log, program, number):
    """Whether the kernel logs what filters tell it, where it can be read. Its lines are written by a thread of its own."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        child = subprocess.Popen([program])
        r.require(child.wait() == 0, "the program under a filter of its own failed")
        for _ in range(50):
            if log.has(child.pid, number):
                return True
            time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def library(rig):
    return built(rig, "probe.so", LIBRARY, "-shared", "-fPIC")


@pytest.fixture(scope="module")
def program(rig):
    return built(rig, "logged", LOGGED)


def test_log_allows_and_serves_and_the_kernel_logs_it(rig, library, program):
    """It is allowed, and the kernel logs it."""
    number = call()
    daemon = Probed(rig, "log", library)
    info = daemon.sandbox()
    r.require((info["mode"], info["landlock"], info["refused"]) == ("log", "off", 0), f"{info}")
    r.require({"control", "session"} <= set(info["filtered"]), f"{info}")
    r.require(daemon.cli("status").stdout.splitlines()[-1].startswith("sandbox: log"), "status does not say so")
    r.require(daemon.status()["sandbox"]["mode"] == "log", "status --json does not say so")
    daemon.serves()
    answers = daemon.answers()
    r.require(len(answers) > 1 and set(answers) == {"allowed"}, f"{answers}")
    r.require(not daemon.lines() and daemon.sandbox()["refused"] == 0, f"refused in mode log: {daemon.child.tail()}")
    try:
        log = Log()
        if not logs(log, program, number):
            raise r.Skipped("this kernel does not log what filters tell it (audit=0, an audit daemon, or kernel.seccomp.actions_logged)")
        # The log takes a few lines a second only: each command is one more chance.
        r.wait_for("the kernel's line", lambda: (daemon.cli("status"), log.has(daemon.child.pid, number))[1], every_s=0.2)
    except r.Skipped as e:
        rig.say(f"the kernel's log is not checked: {e}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_on_refuses_counts_and_serves(rig, library):
    """It fails with EPERM, is counted, and named once; the load ends well."""
    number = call()
    daemon = Probed(rig, "on", library)
    daemon.serves()
    answers, refused = daemon.answers(), daemon.sandbox()["refused"]
    r.require(set(answers) == {"EPERM"}, f"{answers}")
    # The client that asks is a connection, too.
    r.require(refused > len(answers) > 1, f"{refused} counted, {len(answers)} made before")
    lines = daemon.lines()
    r.require(lines == [("control", str(number), "answered EPERM")], f"{lines}: {daemon.child.tail()}")
    r.require(daemon.child.stop() == 0, daemon.child.tail())


def test_kill_ends_the_daemon(rig, library):
    """It ends the daemon."""
    number = call()
    control = rig.dir / "kill.ctl"
    child = r.Child(rig, "kill", ["env", f"LD_PRELOAD={library}", r.binary("vshunt"), "serve", "--sandbox=kill", "--control", control])
    r.wait_for("the control socket", lambda: control.exists() or not child.running())
    r.run([r.binary("vshunt"), "-c", control, "status"], check=False)
    r.require(child.wait() == -signal.SIGABRT, f"it ended with {child.process.returncode}: {child.tail()}")
    r.require(f"made system call {number}, which it may not: ending at once" in child.output(), child.tail())
