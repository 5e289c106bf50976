"""NBD servers with TLS: load over it, what a certificate must be like, and servers that are lost, hang or lie."""

import os
import time
from pathlib import Path

import nbd_servers as n
import nbd_tls
import pytest
import qcow2_disks as q
import rig as r


class Secure(n.Server):
    """nbdkit with TLS."""

    def __init__(self, rig, folder, *arguments, name="secure", plugin=("memory", str(n.SIZE))):
        socket = rig.dir / f"{name}.sock"
        program = r.tool("nbdkit", "nbdkit")
        tls = ["--tls=require", f"--tls-certificates={folder}"]
        super().__init__(rig, name, [program, "-f", "--exit-with-parent", "-U", socket, *tls, *arguments, *plugin], socket)

    def uri(self, export="", **parameters):
        more = "".join(f"&tls-{key}={value}" for key, value in parameters.items())
        return f"nbds+unix:///{export}?socket={self.socket}{more}"


class Liar(n.Server):
    """The server of `nbd_liar.py`, with TLS."""

    def __init__(self, rig, way, folder, name, **options):
        socket = rig.dir / f"{name}.sock"
        argv = n.liar_argv(socket, way, tls=folder, **options)
        super().__init__(rig, name, argv, socket)

    def connections(self):
        return self.child.output().count("a connection")

    uri = Secure.uri


@pytest.fixture(scope="module")
def authority(rig):
    return nbd_tls.Authority(rig)


def serve(rig, uri, name, *keys):
    disk = ",".join((f"name=d0,uri={uri}", *keys))
    return r.Daemon(rig, "--disk", disk, "--export", n.export(rig), name=name)


def refused(rig, uri, *words):
    n.refused(rig, f"name=d0,uri={uri}", *words)


def loaded(rig, daemon, name, *arguments, **keys):
    """Runs verified load until it ends well, and ends the daemon."""
    n.loaded(rig, name, *arguments, **keys)
    n.ends(daemon)


@pytest.mark.parametrize("bs", ("4k", "256k"))
def test_load_is_verified(rig, authority, bs):
    server = Secure(rig, authority.sign("server"), "--tls-verify-peer", name=f"server-{bs}")
    daemon = serve(rig, server.uri(certificates=authority.sign("client")), f"of-{bs}")
    loaded(rig, daemon, bs, "--size", "16M" if bs == "4k" else "64M", bs=bs)


def test_a_qcow2_image(rig, authority):
    image = q.create(rig.dir / "tls.qcow2")
    os.truncate(image, 96 << 20)
    server = Secure(rig, authority.sign("server"), "--tls-verify-peer", name="server-qcow2", plugin=("file", image))
    daemon = serve(rig, server.uri(certificates=authority.sign("client")), "of-qcow2", "format=qcow2")
    loaded(rig, daemon, "qcow2", "--size", "16M")
    server.kill()
    q.checked(image)


# What the certificate is for, where the URI says that the server is, and where it does not say so.
NAMES = (("DNS:localhost", "localhost", "127.0.0.1"), ("IP:127.0.0.1", "127.0.0.1", "localhost"))


@pytest.mark.parametrize("names,host,other", NAMES, ids=("name", "address"))
def test_qemus_server_over_tcp(rig, authority, names, host, other):
    port = n.free_port()
    creds = f"tls-creds-x509,id=t,endpoint=server,verify-peer=yes,dir={authority.sign('server', names)}"
    argv = [r.tool("qemu-nbd", "qemu-utils"), "-b", "127.0.0.1", "-p", port, "-f", "raw", "-x", "x", "-e", "4", "-t"]
    image = rig.image(f"tls-{host}.img", n.SIZE)
    server = r.Child(rig, f"qemu-tls-{host}", [*argv, "--object", creds, "--tls-creds", "t", image])
    more = f"/x?tls-certificates={authority.sign('client')}"
    daemon = serve(rig, f"nbds://{host}:{port}{more}", f"of-qemu-{host}", "open-timeout=60")
    loaded(rig, daemon, f"qemu-{host}", "--size", "16M")
    refused(rig, f"nbds://{other}:{port}{more}", f"is not for {other}", "tls-hostname=")
    daemon = serve(rig, f"nbds://{other}:{port}{more}&tls-hostname={host}", f"of-other-{other}")
    n.ends(daemon)
    refused(rig, f"nbd://{host}:{port}/x", "requires TLS", "nbds://")
    server.kill()


def test_a_server_that_knows_tls_1_2_only(rig, authority):
    server = Liar(rig, "honest", authority.sign("server"), name="old", version="1.2")
    daemon = serve(rig, server.uri(certificates=authority.sign("client")), "of-old")
    loaded(rig, daemon, "old", "--size", "4M")
    server.kill()


def test_a_server_that_sends_single_bytes(rig, authority):
    server = Liar(rig, "honest", authority.sign("server"), name="bytes", drip=0)
    daemon = serve(rig, server.uri(certificates=authority.sign("client")), "of-bytes")
    loaded(rig, daemon, "bytes", "--size", "256K")
    server.kill()


def test_certificates_that_are_refused(rig, authority):
    other, right = nbd_tls.Authority(rig, "other"), authority.sign("client")
    server = Secure(rig, authority.sign("server"), "--tls-verify-peer", name="strict")
    refused(rig, server.uri(certificates=other.sign("client")), "unknown authority", "tls-certificates=")
    refused(rig, server.uri(certificates=right, hostname="storage.example"), "is not for storage.example", "tls-hostname=")
    # Its common name, which does not count.
    refused(rig, server.uri(certificates=right, hostname="of-a-test"), "is not for of-a-test", "tls-hostname=")
    # Its verdict on a client comes after the handshake in TLS 1.3.
    (right / "client-cert.pem").unlink()
    refused(rig, server.uri(certificates=right), "client-cert.pem")
    (right / "client-key.pem").unlink()
    refused(rig, server.uri(certificates=right), "if it verifies its clients", "client-cert.pem")
    keyless = authority.sign("client")
    (keyless / "client-key.pem").unlink()
    refused(rig, server.uri(certificates=keyless), "client-key.pem")
    refused(rig, server.uri(certificates=rig.dir / "none"), "ca-cert.pem")
    (right / "ca-cert.pem").write_text("no certificate\n")
    refused(rig, server.uri(certificates=right), "ca-cert.pem")


def test_a_revoked_certificate_is_refused(rig, authority):
    bad, good, client = authority.sign("server"), authority.sign("server"), authority.sign("client")
    servers = {name: Secure(rig, folder, name=name) for name, folder in (("bad", bad), ("good", good))}
    (client / "ca-crl.pem").write_bytes(authority.revoke(bad / "server-cert.pem").read_bytes())
    refused(rig, servers["bad"].uri(certificates=client), "was revoked")
    daemon = serve(rig, servers["good"].uri(certificates=client), "of-good")
    loaded(rig, daemon, "good", "--size", "1M")
    # Without a list in the file, none would count as revoked.
    for text in ("", authority.cert.read_text()):
        (client / "ca-crl.pem").write_text(text)
        refused(rig, servers["bad"].uri(certificates=client), "ca-crl.pem", "list of revoked certificates")


def test_the_authorities_of_the_system(rig, authority, monkeypatch):
    server = Secure(rig, authority.sign("server"), name="private")
    refused(rig, server.uri(), "unknown authority", "tls-certificates=")
    # As if the system trusted this authority, and then none.
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert))
    allowed = ["--allow-path", authority.dir]
    daemon = r.Daemon(rig, "--disk", f"name=d0,uri={server.uri()}", "--export", n.export(rig), *allowed, name="of-system")
    loaded(rig, daemon, "system", "--size", "1M")
    empty = rig.dir / "empty.pem"
    empty.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(empty))
    refused(rig, server.uri(), "trusts no authority", "tls-certificates=")


def test_an_expired_certificate_is_refused(rig, authority):
    server = Secure(rig, authority.sign("server", days=-1), name="expired")
    refused(rig, server.uri(certificates=authority.sign("client")), "has expired")


def test_a_server_without_tls_is_refused(rig, authority):
    server = n.nbdkit(rig, "memory", str(n.SIZE), name="open")
    uri = server.uri().replace("nbd+unix", "nbds+unix")
    refused(rig, f"{uri}&tls-certificates={authority.sign('client')}", "has no TLS", "nbd://")


def test_a_server_that_is_killed_loses_no_write(rig, authority, pytestconfig):
    image = rig.image("killed.img", n.SIZE)
    server = Secure(rig, authority.sign("server"), name="killed", plugin=("file", image))
    uri = server.uri(certificates=authority.sign("client"))
    daemon = serve(rig, uri, "of-killed", "reconnect-delay=120")
    load = r.Child(rig, "load-killed", n.load(rig, "--runtime", r.FOREVER))

    requests = lambda: n.requests(daemon, load)  # noqa: E731
    for _ in range(pytestconfig.getoption("--kills") or 5):
        before = requests()
        r.wait_for("requests", lambda before=before: requests() > before + 100)
        server.kill()
        server.start()
    before = requests()
    r.wait_for("requests after the last kill", lambda: requests() > before + 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    # One for each worker; a job or a command may have one, too.
    left = nbd_tls.carriers(daemon)
    r.require(len(left) <= 4, f"threads of lost connections are left: {left}")
    n.ends(daemon)


def test_another_server_at_the_same_place_is_not_used(rig, authority):
    """One without TLS, and one whose certificate another authority has signed, while requests wait."""
    plugin = ("file", rig.image("place.img", n.SIZE))
    server = Secure(rig, authority.sign("server"), name="place", plugin=plugin)
    other = nbd_tls.Authority(rig, "other-place")
    daemon = serve(rig, server.uri(certificates=authority.sign("client")), "of-place", "reconnect-delay=300")
    load = r.Child(rig, "load-place", n.load(rig, "--runtime", r.FOREVER))
    r.wait_for("requests", lambda: n.requests(daemon, load) > 100)
    right = server.argv
    begin = right[: right.index("--tls=require")]
    wrong = (("has no TLS", ["--tls=off"]), ("unknown authority", ["--tls=require", f"--tls-certificates={other.sign('server')}"]))
    for words, tls in wrong:
        server.kill()
        server.argv = [*begin, *tls, *plugin]
        server.start()
        r.wait_for(f"the log says {words!r}", lambda words=words: words in daemon.child.output())
        before = n.requests(daemon, load)
        time.sleep(0.5)
        r.require(n.requests(daemon, load) == before, "requests are served by another server")
    server.kill()
    server.argv = right
    server.start()
    before = n.requests(daemon, load)
    r.wait_for("requests by the right server", lambda: n.requests(daemon, load) > before + 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    n.ends(daemon)
    server.kill()


def test_a_disk_that_is_added_while_the_daemon_runs(rig, authority):
    server = Secure(rig, authority.sign("server"), name="later")
    daemon = r.Daemon(rig, name="empty")
    daemon.cli("disk", "add", f"name=d0,uri={server.uri(certificates=authority.sign('client'))}")
    daemon.cli("export", "add", n.export(rig))
    loaded(rig, daemon, "added", "--size", "4M")


HANDSHAKES = (
    ("tls-garbage", {}, "refuses TLS"),
    ("tls-inject", {}, "refuses TLS"),
    ("tls-huge", {}, "TLS"),
    ("tls-cut", {}, "breaks TLS off"),
    ("tls-hang", {}, "does not answer in time"),
    ("honest", {"drip": 0.2}, "does not answer in time"),
)


@pytest.mark.parametrize("way,options,words", HANDSHAKES, ids=[way.replace("honest", "tls-drip") for way, *_ in HANDSHAKES])
def test_handshakes_that_fail(rig, authority, way, options, words):
    """`tls-inject` continues without TLS behind its answer, as someone on the way can."""
    server = Liar(rig, way, authority.sign("server"), name=f"shake-{way}", **options)
    refused(rig, server.uri(certificates=authority.sign("client")), words)
    server.kill()


# What the server does within TLS or below it, and words of the log line. One that closes may have
# left requests unread.
WAYS = {
    "magic": "broke the protocol",
    "half": "",
    "close": "",
    "notify": "closed it",
    "half-close": "closed it",
    "records": "TLS:",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_server_that_lies_once_is_left(rig, authority, way):
    server = Liar(rig, way, authority.sign("server"), name=f"lie-{way}", once=1)
    daemon = serve(rig, server.uri(certificates=authority.sign("client")), f"of-lie-{way}", "reconnect-delay=120")
    load = r.Child(rig, f"load-lie-{way}", n.load(rig, "--size", "4M"))
    code = load.wait(180)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    lost = [line for line in daemon.child.output().splitlines() if "is lost" in line]
    r.require(lost and WAYS[way] in lost[0], f"{lost or daemon.child.output()}")
    r.wait_for("threads of lost connections end", lambda: len(nbd_tls.carriers(daemon)) <= 2)
    n.ends(daemon)
    server.kill()


def cpu_of(daemon):
    """The CPU time of all its threads, also of those that have ended."""
    return nbd_tls.cpu_s([Path(f"/proc/{daemon.child.pid}")])


@pytest.mark.root
@pytest.mark.parametrize("way", ("flood", "hang"))
def test_a_server_that_floods_or_hangs_harms_its_own_disk_only(rig, authority, way):
    """`flood`: it sends what nobody has asked for, on each connection. `hang`: it answers nothing more."""
    server = Liar(rig, way, authority.sign("server"), name=f"other-{way}", after=0)
    daemon = r.Daemon(rig, "--disk", "name=d1,format=ram,size=64M", "--export", n.export(rig, "vm1", "d1", workers="default"), name=f"of-{way}")
    other = n.load(rig, "--size", "8M", name="vm1")
    r.run(other)
    fds = Path(f"/proc/{daemon.child.pid}/fd")
    before, memory = len(list(fds.iterdir())), nbd_tls.memory_kib(daemon)
    daemon.cli("disk", "add", f"name=d0,uri={server.uri(certificates=authority.sign('client'))}")
    load = None
    if way == "hang":
        daemon.cli("export", "add", n.export(rig, workers="default"))
        load = r.Child(rig, "load-hang", n.load(rig, "--runtime", r.FOREVER))
        r.wait_for("requests in flight", lambda: any(q["in-flight"] for q in daemon.status()["queues"]))
    if way == "flood":
        r.wait_for("the flood ends the connection", lambda: "broke the protocol" in daemon.child.output())
        r.require(r.run(other, check=False, timeout_s=120).returncode == 0, "the other disk is not served")
        # Each connection is flooded, and its thread is another one. So the whole daemon counts,
        # which serves nothing else now, over the time of some connections: the pause between two is
        # 2 s at most. They may not use up a CPU.
        used, start, made = cpu_of(daemon), time.monotonic(), server.connections()
        r.wait_for("more connections are flooded", lambda: server.connections() > made + 3)
        used, taken = cpu_of(daemon) - used, time.monotonic() - start
        r.require(used < 0.2 * taken, f"the daemon uses {used} s of CPU time in {taken} s, while the server floods")
    else:
        r.wait_for("a thread of TLS", lambda: nbd_tls.carriers(daemon))
        time.sleep(0.5)
        used = nbd_tls.cpu_s(nbd_tls.carriers(daemon))
        r.require(r.run(other, check=False, timeout_s=120).returncode == 0, "the other disk is not served")
        time.sleep(1)
        used = nbd_tls.cpu_s(nbd_tls.carriers(daemon)) - used
        r.require(used < 0.2, f"the threads of TLS use {used} s of CPU time and more while nobody takes anything")
    memory = nbd_tls.memory_kib(daemon) - memory
    r.require(memory < 16 << 10, f"the daemon has {memory} KiB more than before")
    if way == "hang":
        server.kill()
        load.wait(60)
        daemon.cli("export", "remove", "vm0", "--force")
    daemon.cli("disk", "remove", "d0")
    r.wait_for("the thread of TLS ends", lambda: not nbd_tls.carriers(daemon))
    r.wait_for("its descriptors are closed", lambda: len(list(fds.iterdir())) <= before)
    n.ends(daemon)
    server.kill()
