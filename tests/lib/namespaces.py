"""Mount and network namespaces of the test process.

A process that runs tests also runs other groups of tests afterwards. It keeps a mount namespace
until it ends, which harms no other group. It keeps a network namespace only within a `with`
statement.
"""

import ctypes
import os
from pathlib import Path

import rig as r

CLONE_NEWNS, CLONE_NEWNET = 0x0002_0000, 0x4000_0000

libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags):
    """unshare(2) for the calling thread, which has to be the main thread, as it starts all programs."""
    if os.geteuid() != 0:
        raise r.Skipped("not root: no namespaces")
    if libc.unshare(flags) != 0:
        raise r.Skipped(f"no namespace of our own can be made: {os.strerror(ctypes.get_errno())}")
    if flags & CLONE_NEWNS:
        r.run(["mount", "--make-rprivate", "/"])


class OwnNetwork:
    """A network namespace with nothing but `lo`, and a /sys that shows it, for `with`."""

    def __enter__(self):
        self.folder = os.getcwd()
        self.former = [(os.open(f"/proc/self/ns/{name}", os.O_RDONLY), flag) for name, flag in (("net", CLONE_NEWNET), ("mnt", CLONE_NEWNS))]
        try:
            unshare(CLONE_NEWNET | CLONE_NEWNS)
            r.run(["mount", "-t", "sysfs", "sysfs", "/sys"])
            # The host's stack says nothing by itself.
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
            r.run([r.tool("ip", "iproute2"), "link", "set", "lo", "up"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for fd, flag in self.former:
            if libc.setns(fd, flag) != 0:
                raise OSError(ctypes.get_errno(), "setns: the process cannot go back to its former namespace")
            os.close(fd)
        # setns goes to the root folder.
        os.chdir(self.folder)
