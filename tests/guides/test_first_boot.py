"""From the package to a running virtual machine: what is installed in a fresh Debian 12 is the package and QEMU, and the commands are
those of the README and those that `vshunt serve` prints. The time of each step is shown."""

import re
import time

import pytest
import rig as r
from debian_root import Root
from guide_guest import Console, with_qemu


@pytest.fixture(scope="module")
def fresh(rig):
    with Root(rig, "bookworm", ("qemu-system-x86",)) as root:
        with_qemu(root)
        yield root
        root.kill()


def test_image_served_and_line_pasted(fresh, rig, package, image):
    """`vshunt serve disk.img`, and the line for QEMU as it is printed. Added is `-nographic`, for this test has no screen."""
    taken_s = []

    def step(what, begin):
        taken_s.append(time.monotonic() - begin)
        rig.say(f"{what}: {taken_s[-1]:.1f} s")

    fresh.put(package, "root/vshunt.deb")
    r.run(["cp", "--sparse=always", image, fresh.path / "root/disk.img"])
    begin = time.monotonic()
    fresh.outside("apt-get", "-q", "-y", "--no-install-recommends", "install", "/root/vshunt.deb")
    step("apt install ./vshunt.deb", begin)
    fresh.boot()
    begin = time.monotonic()
    daemon = r.Child(rig, "serve", fresh.argv("sh", "-c", "cd; exec vshunt serve disk.img"))
    line = r.wait_for("the line for QEMU", lambda: re.search(r"^QEMU:\n((?:.*\\\n)+.*[^\\\n]\n)", daemon.output(), re.MULTILINE))[1].strip()
    step("vshunt serve disk.img", begin)
    begin = time.monotonic()
    console = Console(rig, fresh.argv("sh", "-euc", f"{line} -nographic"), "the line for QEMU")
    console.up()
    step("the line for QEMU, until the guest has a shell", begin)
    status, said = console.run("cat /sys/block/vda/size\ndd if=/dev/vda of=/dev/null bs=1M count=8")
    r.require(status == 0 and re.search(r"^2097152$", said, re.MULTILINE), f"the guest has another disk: {said}")
    shown = fresh.shell("vshunt status")
    r.require(re.search(r"^disk .*connected", shown, re.MULTILINE), f"no guest is connected: {shown}")
    rig.say(f"from the package to a shell in the guest: {sum(taken_s):.1f} s")
    console.run("poweroff")
    fresh.shell("vshunt quit")
    r.wait_for("the daemon ends", lambda: not daemon.running())
