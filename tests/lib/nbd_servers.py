"""NBD servers for tests: nbdkit, qemu-nbd and one that breaks the protocol on UNIX sockets, nbd-server on TCP."""

import contextlib
import os
import random
import signal
import socket
import sys
from pathlib import Path

import rig as r

SIZE = 64 << 20


def is_listening(path):
    """Whether a process listens on a UNIX socket, which has its name before. No connection is made: a server may take only one."""
    # The flag __SO_ACCEPTCON; proc(5).
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return any(len(one) == 8 and one[7] == str(path) and int(one[3], 16) & 0x10000 for one in sockets)


def connections(path):
    """How many connections a UNIX socket that listens has, on its own side."""
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return sum(len(one) == 8 and one[7] == str(path) and not int(one[3], 16) & 0x10000 for one in sockets)


class Server:
    """A server that can be killed and started again at the same socket."""

    def __init__(self, rig, name, argv, socket):
        self.rig, self.name, self.argv, self.socket = rig, name, argv, Path(socket)
        self.child = None
        self.start()

    def start(self):
        self.socket.unlink(missing_ok=True)
        self.child = r.Child(self.rig, self.name, self.argv)

        def listens():
            r.require(self.child.running(), f"{self.name} ended with {self.child.process.returncode}: {self.child.tail()}")
            return is_listening(self.socket)

        r.wait_for(f"{self.name} listens", listens)

    def kill(self):
        self.child.kill()

    def uri(self, export=""):
        return f"nbd+unix:///{export}?socket={self.socket}"


class NbdServer:
    """nbd-server with an export `disk`, on a TCP port of the loopback interface. It is a daemon that forks for each connection."""

    def __init__(self, rig, image, name, **keys):
        """`keys`: more keys of the export."""
        self.name, self.port, self.pid = name, free_port(), None
        self.config, self.pid_file = rig.dir / f"{name}.conf", rig.dir / f"{name}.pid"
        self.program = r.tool("nbd-server", "nbd-server")
        export = {"exportname": image, "flush": "true", "fua": "true", "trim": "true", **keys}
        lines = ["[generic]", "listenaddr = 127.0.0.1", f"port = {self.port}", "[disk]", *(f"{key} = {value}" for key, value in export.items())]
        self.config.write_text("\n".join(lines) + "\n")
        rig.children.append(self)
        self.start()

    def start(self):
        """Starts it, also again at the same port after a kill, and waits until it listens."""
        self.pid_file.unlink(missing_ok=True)
        r.run([self.program, "-C", self.config, "-p", self.pid_file])
        r.wait_for(f"{self.name} writes its process id", lambda: self.pid_file.exists() and self.pid_file.read_text().strip())
        self.pid = int(self.pid_file.read_text())
        r.wait_for(f"{self.name} listens", self.listens)

    def listens(self):
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self):
        """SIGKILL to the daemon and to what it has forked: it leads a process group."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.pid = None
            r.wait_for(f"{self.name} ends", lambda: not self.listens())

    def uri(self, export="disk"):
        return f"nbd://127.0.0.1:{self.port}/{export}"


def nbdkit(rig, *arguments, name="nbdkit"):
    socket = rig.dir / f"{name}.sock"
    program = r.tool("nbdkit", "nbdkit")
    return Server(rig, name, [program, "-f", "--exit-with-parent", "-U", socket, *arguments], socket)


def qemu_nbd(rig, image, *arguments, export="disk", clients=4, name="qemu-nbd"):
    """`clients`: with 1 the server offers no CAN_MULTI_CONN, and takes no second connection."""
    socket = rig.dir / f"{name}.sock"
    program = r.tool("qemu-nbd", "qemu-utils")
    # unmap: a discard makes a hole.
    argv = [program, "-k", socket, "-f", "raw", "-x", export, "-e", clients, "-t", "--discard=unmap", *arguments, image]
    return Server(rig, name, argv, socket)


def storage_daemon(rig, image, export="disk", name="qsd"):
    """QEMU's storage daemon."""
    socket = rig.dir / f"{name}.sock"
    argv = [r.tool("qemu-storage-daemon", "qemu-system-common"), "--blockdev", f"driver=file,node-name=d,filename={image}"]
    argv += ["--nbd-server", f"addr.type=unix,addr.path={socket},max-connections=16"]
    return Server(rig, name, [*argv, "--export", f"type=nbd,id=e,node-name=d,name={export},writable=on"], socket)


def liar_argv(socket, way, **options):
    """The arguments of the server of `nbd_liar.py`."""
    program = Path(__file__).with_name("nbd_liar.py")
    return [sys.executable, "-B", program, socket, way, *(f"{key}={value}" for key, value in options.items())]


def liar(rig, way, name="liar", **options):
    """The server of `nbd_liar.py`, which behaves in this way."""
    socket = rig.dir / f"{name}.sock"
    return Server(rig, name, liar_argv(socket, way, **options), socket)


def free_port():
    """A TCP port of the loopback interface that no program listens on now. It is below those that connections get, so none takes it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # Other tests and runs at the same time choose, too.
        port = random.randrange(2048, first) if first > 4096 else 0
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return s.getsockname()[1]


def disk(server, export="", **keys):
    """The value of --disk for an export of a server."""
    more = "".join(f",{key.replace('_', '-')}={value}" for key, value in keys.items())
    return f"name=d0,uri={server.uri(export)}{more}"


def refused(rig, disk, *words):
    """A daemon does not start with this disk, and says why in a line that has these words."""
    argv = [r.binary("vshunt"), "serve", "--disk", disk, "--export", export(rig), "--no-control"]
    done = r.run(argv, check=False, timeout_s=90)
    r.message_of(done, *words)
    r.require(len(done.stderr.splitlines()) == 1, f"more than one line: {done.stderr}")


def export(rig, name="vm0", of="d0", queues=2, workers=2):
    """The value of --export for a disk."""
    return f"type=vhost-user-blk,name={name},disk={of},socket={rig.dir / (name + '.sock')},queues={queues},workers={workers}"


def serve(rig, server_export, *more, name="vshunt", **keys):
    """A daemon that serves a disk `d0` as `vm0`: `server_export` is a server and the name of its export."""
    server, wanted = server_export
    return r.Daemon(rig, "--disk", disk(server, wanted, **keys), "--export", export(rig), *more, name=name)


def load(rig, *arguments, name="vm0", queues=2, bs="4k", rw="randrw"):
    """The arguments of verified load."""
    socket = rig.dir / f"{name}.sock"
    argv = [r.binary("vshunt-bench"), "blk", "--socket", socket, "--rw", rw, "--verify", "--bs", bs]
    return [*argv, "--queues", queues, "--iodepth", 16, "--stall", "120s", "--flush-every", 32, "--quiet", *arguments]


def loaded(rig, name, *arguments, **keys):
    """Runs verified load until it ends well."""
    child = r.Child(rig, f"load-{name}", load(rig, *arguments, **keys))
    code = child.wait(300)
    r.require(code == 0, f"vshunt-bench ended with {code}: {child.tail()}")


def requests(daemon, load):
    """Requests that a daemon has served so far, while this load runs."""
    r.require(load.running(), f"vshunt-bench ended with {load.process.returncode}: {load.tail()}")
    return sum(queue["requests"] for queue in daemon.status()["queues"])


def ends(daemon):
    """A daemon ends well when it is told to."""
    code = daemon.child.stop()
    r.require(code == 0, f"vshunt ended with {code}: {daemon.child.tail()}")
