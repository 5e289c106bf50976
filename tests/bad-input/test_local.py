"""What local users, files and daemons do to a command or a daemon that must not be held, nor show forged lines."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import threading

import rig as r

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'


@contextlib.contextmanager
def talker(rig, then):
    """A daemon of the test's own that greets, agrees with the capabilities, and then does something else."""
    path = rig.dir / "talker"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            stream = listener.accept()[0]
            with stream, contextlib.suppress(OSError):
                stream.sendall(GREETING)
                stream.recv(4096)
                stream.sendall(b'{"return": {}}\r\n')
                then(stream)

        thread = threading.Thread(target=serve)
        thread.start()
        yield path
        thread.join()
    path.unlink()


def test_bytes_without_end_from_a_daemon_do_not_fill_the_memory(rig):
    def endless(stream):
        while True:
            stream.sendall(b"x" * (1 << 20))

    with talker(rig, endless) as path:
        done = r.run(["prlimit", f"--as={2 << 30}", r.binary("vshunt"), "-c", path, "status"], check=False)
    r.message_of(done, path, "a line of more than", "is it a vshunt?")


def test_a_text_of_a_daemon_forges_no_line(rig):
    def refuse(stream):
        stream.recv(4096)
        stream.sendall(json.dumps({"error": {"class": "GenericError", "desc": "no\nvshunt: all is well\x1b[2K"}}).encode() + b"\n")

    with talker(rig, refuse) as path:
        done = r.run([r.binary("vshunt"), "-c", path, "disk", "list"], check=False)
    r.require(done.stderr.count("\n") == 1 and "no\\nvshunt: all" in done.stderr, done.stderr)


def test_a_key_of_a_configuration_forges_no_line(rig):
    file = rig.dir / "forged.toml"
    file.write_text('[[disk]]\n"a\\nvshunt: forged" = 1\n')
    done = r.run([r.binary("vshunt"), "config", "check", file], check=False)
    r.message_of(done, "unknown key `a\\nvshunt: forged`", code=(2,))
    r.require(done.stderr.count("\n") == 1, done.stderr)


def test_a_fifo_as_a_configuration_is_not_waited_for(rig):
    fifo = rig.dir / "fifo"
    os.mkfifo(fifo)
    for argv in (["config", "check", fifo], ["serve", "--config", fifo], ["serve", fifo], ["config", "check", "/dev/zero"]):
        done = r.run([r.binary("vshunt"), *argv], check=False)
        r.message_of(done, argv[-1], code=(2,))
    # A pipe that the program has inherited is one that the user means.
    text = 'control = false\n[[disk]]\nname = "d"\nformat = "null"\nsize = "1M"\n'
    done = subprocess.run([r.binary("vshunt"), "config", "check", "/dev/stdin"], input=text, text=True, capture_output=True, timeout=r.WAIT_S)
    r.message_of(done, "/dev/stdin:1:1: there is neither", code=(2,))


def test_a_large_configuration_is_checked(rig):
    """Each name was looked for among all others before."""
    file = rig.dir / "large.toml"
    with file.open("w") as out:
        for n in range(100_000):
            out.write(f'[[disk]]\nname = "d{n}"\nformat = "null"\nsize = "1M"\n')
    done = r.run([r.binary("vshunt"), "config", "check", file])
    r.require("100000 disks" in done.stdout, done.stdout)


def test_a_small_image_that_claims_terabytes_of_parts_is_refused(rig):
    """All entries of its L1 table lead to two L2 tables, in which each cluster differs from the one before."""
    image, cluster, copied = rig.dir / "small.qcow2", 1 << 16, 1 << 63
    r.run([r.binary("vshunt"), "image", "create", "-q", "-f", "qcow2", image, "1T"])
    with image.open("r+b") as file:
        entries, at = struct.unpack(">IQ", file.read(48)[36:48])
        end = -(-image.stat().st_size // cluster) * cluster
        file.seek(end)
        for first in (0, 1):
            file.write(b"".join(struct.pack(">Q", n % 2 ^ first) for n in range(cluster // 8)))
        file.seek(at)
        file.write(b"".join(struct.pack(">Q", end + n % 2 * cluster | copied) for n in range(entries)))
    r.require(image.stat().st_size <= 1 << 20, "the image is not small")
    for command in (["map"], ["map", "--output=json"], ["measure", "-O", "qcow2"]):
        done = r.run([r.binary("vshunt"), "image", *command, image], check=False)
        r.message_of(done, "share the L2 table", "image check")
