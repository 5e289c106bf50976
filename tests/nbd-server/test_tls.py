"""NBD exports with TLS: real clients, what certificates must be like, handshakes that fail, and ends of connections."""

import contextlib
import os
import random
import signal
import socket
import ssl
import struct
import sys
import time
from pathlib import Path

import nbd_client as c
import nbd_exports as e
import nbd_servers as n
import nbd_tls
import pytest
import rig as r

MIB = 1 << 20
CARRIER = "n0/tls"


def carriers(daemon):
    return nbd_tls.carriers(daemon, CARRIER)


def rest(daemon):
    """Nothing is left of connections."""
    r.wait_for("the queues are free", lambda: not e.running(daemon))
    r.wait_for("the threads of TLS end", lambda: not carriers(daemon))


def secure_uri(daemon, folder):
    return f"nbds+unix:///n0?socket={os.fspath(daemon.at)}&tls-certificates={folder}"


def greeted(daemon):
    """A client that is greeted, and has not begun TLS."""
    client = c.Client(os.fspath(daemon.at))
    client.greet()
    return client


def reads_back(daemon, at=None):
    data = random.Random(11).randbytes(MIB)
    with c.Client(at or daemon.at, "n0") as client:
        client.write(MIB, data)
        r.require(client.read(MIB, MIB) == data, "it reads as something else")


def logs(daemon, *words):
    r.wait_for(f"the log says {words}", lambda: all(word in daemon.child.output() for word in words))


# Real clients.


def over_tcp(rig, authority, name, disk="ram", names="DNS:localhost,IP:127.0.0.1", **keys):
    port = n.free_port()
    daemon = e.serve(rig, e.disk_of(rig, disk, name), name=name, listen=port, tls_certificates=authority.sign("server", names), workers=2, **keys)
    daemon.port = port
    return daemon


def test_libnbds_programs(rig, authority):
    info, copy = (r.tool(name, "libnbd-bin") for name in ("nbdinfo", "nbdcopy"))
    daemon, client = over_tcp(rig, authority, "libnbd", "qcow2"), authority.sign("client")
    uri = f"nbds://localhost:{daemon.port}/n0?tls-certificates={client}"
    shown = r.run([info, uri]).stdout
    r.require("TLS" in shown and "base:allocation" in shown, shown)
    source, back = rig.dir / "libnbd.in", rig.dir / "libnbd.out"
    source.write_bytes(random.Random(1).randbytes(e.SIZE // 2) + bytes(e.SIZE // 2))
    r.run([copy, "--connections=4", "--requests=16", source, uri], timeout_s=180)
    r.run([copy, "--connections=4", "--requests=16", uri, back], timeout_s=180)
    r.require(back.read_bytes() == source.read_bytes(), "the copy differs")
    plain = r.run([info, f"nbd://localhost:{daemon.port}/n0"], check=False)
    r.require(plain.returncode != 0, f"{plain}")
    listed = r.run([info, "--list", f"nbds://localhost:{daemon.port}/?tls-certificates={client}"]).stdout
    r.require("n0" in listed, listed)
    rest(daemon)
    e.ends_well(daemon)


def test_libnbds_module_for_python(rig, authority):
    if r.run([sys.executable, "-c", "import nbd"], check=False).returncode != 0:
        raise r.Skipped("the Python module nbd is missing (Debian package python3-libnbd)")
    daemon, client = over_tcp(rig, authority, "module"), authority.sign("client")
    uri = f"nbds://localhost:{daemon.port}/n0?tls-certificates={client}"
    script = (
        "import nbd, sys",
        "h = nbd.NBD()",
        "h.set_uri_allow_local_file(True)",
        "h.add_meta_context('base:allocation')",
        "h.connect_uri(sys.argv[1])",
        "h.pwrite(b'n' * 512, 4096)",
        "h.flush()",
        "assert h.pread(1024, 4096) == b'n' * 512 + bytes(512)",
        "found = []",
        "h.block_status(8192, 0, lambda name, at, entries, error: found.append((name, at, entries)) or 0)",
        "assert found[0][:2] == ('base:allocation', 0) and sum(found[0][2][::2]) > 0, found",
        "h.shutdown()",
    )
    r.run([sys.executable, "-c", "\n".join(script), uri])
    rest(daemon)
    e.ends_well(daemon)


def qemu_arguments(daemon, folder):
    creds = f"tls-creds-x509,id=t,endpoint=client,verify-peer=yes,dir={folder}"
    where = f"driver=nbd,server.type=inet,server.host=localhost,server.port={daemon.port},export=n0,tls-creds=t"
    return creds, where


def test_qemus_client(rig, authority):
    img, io = r.tool("qemu-img", "qemu-utils"), r.tool("qemu-io", "qemu-utils")
    daemon, client = over_tcp(rig, authority, "qemu", "raw"), authority.sign("client")
    creds, where = qemu_arguments(daemon, client)
    source = rig.dir / "qemu.in"
    source.write_bytes(random.Random(2).randbytes(8 * MIB) + bytes(e.SIZE - 8 * MIB))
    r.run([img, "convert", "--object", creds, "-n", "--target-image-opts", "-f", "raw", source, where], timeout_s=180)
    r.run([img, "compare", "--object", creds, "--image-opts", f"driver=raw,file.filename={source}", where], timeout_s=180)
    r.run([io, "--object", creds, "--image-opts", where, "-c", "write -P 7 9M 1M", "-c", "flush", "-c", "read -P 7 9M 1M"])
    refused = r.run([img, "info", where.replace(",tls-creds=t", ""), "--image-opts"], check=False)
    r.require(refused.returncode != 0 and "TLS" in refused.stderr, f"{refused}")
    rest(daemon)
    e.ends_well(daemon)


@pytest.mark.parametrize("version", (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3), ids=("1.2", "1.3"))
def test_both_versions_of_tls(rig, authority, version):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name=f"version-{version.name}")
    daemon.at.tls.minimum_version = daemon.at.tls.maximum_version = version
    reads_back(daemon)
    with c.Client(daemon.at, "n0") as client:
        r.require(client.socket.version() == version.name.replace("_", ".", 1).replace("_", "."), client.socket.version())
        data = random.Random(3).randbytes(32 * MIB)
        client.write(0, data)
        r.require(client.read(0, 32 * MIB) == data, "the longest request differs")
    rest(daemon)
    e.ends_well(daemon)


@pytest.mark.parametrize("bs", ("4k", "256k"))
def test_vshunt_is_a_client(rig, authority, bs):
    """Verified load, while the queues of the server move."""
    server = e.serve_tls(rig, authority, e.disk_of(rig, "raw", f"own-{bs}"), workers=2, name=f"own-{bs}")
    disk = f"name=d0,uri={secure_uri(server, authority.sign('client'))}"
    client = r.Daemon(rig, "--disk", disk, "--export", n.export(rig), name=f"client-{bs}")
    load = r.Child(rig, f"load-{bs}", n.load(rig, "--size", "16M" if bs == "4k" else "64M", bs=bs))
    workers, turn = [w["id"] for w in server.status()["workers"]], 0
    while load.running():
        for queue in e.running(server):
            turn += 1
            server.cli("attach", "--timeout", "20s", f"n0:{queue['index']}", str(workers[turn % len(workers)]), check=False)
    code = load.wait(300)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    r.require(turn > 2, "no queue has moved")
    e.ends_well(client)
    rest(server)
    e.ends_well(server)


def test_pipes_of_requests_with_moves(rig, authority):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "raw", "half"), workers=2, name="half")
    workers = [w["id"] for w in daemon.status()["workers"]]
    with c.Client(daemon.at, "n0") as client:
        data = random.Random(6).randbytes(MIB)
        message = client.header(c.WRITE, 0, MIB) + data
        for at, part in enumerate((message[:10], message[10:20], message[20:5000], message[5000:500_000])):
            client.send(part)
            daemon.attach("n0:0", workers[at % 2 + 1])
        client.send(message[500_000:])
        r.require(client.reply()[1] == 0, "the write failed")
        asked = {client.ask(c.READ, 0, MIB): MIB for _ in range(20)}
        for worker in workers[1:]:
            daemon.attach("n0:0", worker)
        for _ in asked:
            cookie, error, found = client.reply(asked)
            r.require(error == 0 and found == data, f"reply {cookie} differs")
    rest(daemon)
    e.ends_well(daemon)


# Certificates.


def tries(daemon, context):
    """Whether a client with these settings can use the export."""
    with contextlib.suppress(c.Gone, ConnectionResetError, BrokenPipeError), c.Client(c.Secure(os.fspath(daemon.at), context), "n0") as client:
        return client.read(0, 512) == bytes(512)
    return False


def test_clients_that_are_refused(rig, authority):
    other = nbd_tls.Authority(rig, "other")
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name="refused")
    anonymous = ssl.create_default_context(cafile=authority.cert)
    foreign = ssl.create_default_context(cafile=authority.cert)
    folder = other.sign("client")
    foreign.load_cert_chain(folder / "client-cert.pem", folder / "client-key.pem")
    for context, words in (
        (anonymous, "it shows no certificate, which tls-verify-peer=on requires"),
        (foreign, "a certificate of an unknown authority"),
        (authority.context(authority.sign("client", days=-1)), "that has expired"),
    ):
        r.require(not tries(daemon, context), f"a client can use it: {words}")
        logs(daemon, words)
    # This one distrusts the server.
    distrusting = ssl.create_default_context(cafile=other.cert)
    try:
        c.Client(c.Secure(os.fspath(daemon.at), distrusting), "n0")
        r.require(False, "the server's certificate is taken")
    except c.Gone as gone:
        r.require(isinstance(gone.__cause__, ssl.SSLCertVerificationError), f"{gone.__cause__}")
    logs(daemon, "breaks TLS")
    reads_back(daemon)
    rest(daemon)
    e.ends_well(daemon)


def test_a_revoked_certificate_is_refused(rig, authority):
    bad, good, server = authority.sign("client"), authority.sign("client"), authority.sign("server")
    (server / "ca-crl.pem").write_bytes(authority.revoke(bad / "client-cert.pem").read_bytes())
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="revoked", tls_certificates=server)
    r.require(not tries(daemon, authority.context(bad)), "a client with a revoked certificate can use it")
    logs(daemon, "a certificate that was revoked")
    r.require(tries(daemon, authority.context(good)), "a client with another certificate cannot use it")
    e.ends_well(daemon)


def test_clients_need_no_certificate_without_verification(rig, authority):
    server = authority.sign("server")
    (server / "ca-cert.pem").unlink()
    daemon = e.serve(rig, e.disk_of(rig, "ram"), name="anyone", tls_certificates=server, tls_verify_peer="off")
    r.require(tries(daemon, ssl.create_default_context(cafile=authority.cert)), "a client without a certificate cannot use it")
    with c.Client(os.fspath(daemon.at)) as client:
        client.greet()
        r.require(client.answers(c.GO, c.text("n0") + bytes(2))[-1][0] == c.TLS_REQUIRED, "it is served without TLS")
    e.ends_well(daemon)


def test_folders_that_are_refused(rig, authority):
    def refused(folder, *words, more=""):
        export = f"type=nbd,name=n0,disk=d0,listen=unix:{rig.dir}/f.nbd,tls-certificates={folder}{more}"
        argv = [r.binary("vshunt"), "serve", "--disk", "name=d0,format=ram,size=1M", "--export", export, "--no-control"]
        r.message_of(r.run(argv, check=False), "export n0", *words)
        r.require(not (rig.dir / "f.nbd").exists(), "its socket exists")

    def without(name):
        folder = authority.sign("server")
        (folder / name).unlink()
        return folder

    refused(rig.dir / "none", "ca-cert.pem", "tls-verify-peer=off")
    refused(rig.dir / "none", "server-cert.pem", more=",tls-verify-peer=off")
    refused(without("ca-cert.pem"), "ca-cert.pem", "tls-verify-peer=off")
    refused(without("server-key.pem"), "server-key.pem")
    refused(without("server-cert.pem"), "server-cert.pem")
    folder = authority.sign("server")
    (folder / "server-key.pem").write_bytes((authority.sign("server") / "server-key.pem").read_bytes())
    refused(folder, "server-cert.pem")
    for text in ("", authority.cert.read_text()):
        folder = authority.sign("server")
        (folder / "ca-crl.pem").write_text(text)
        refused(folder, "ca-crl.pem", "list of revoked certificates")
    for name in ("ca-cert.pem", "server-cert.pem", "server-key.pem"):
        folder = authority.sign("server")
        (folder / name).write_text("nothing\n")
        refused(folder, name)


def test_keys(rig, authority):
    folder = authority.sign("server")
    for export, words in (
        ("type=nbd,name=n0,disk=d0,listen=10809,tls-verify-peer=off", ("tls-verify-peer", "tls-certificates=FOLDER")),
        (f"type=fuse,name=n0,disk=d0,mountpoint=/tmp/x,tls-certificates={folder}", ("tls-certificates", "nbd")),
    ):
        argv = [r.binary("vshunt"), "serve", "--disk", "name=d0,format=ram,size=1M", "--export", export, "--no-control"]
        r.message_of(r.run(argv, check=False), *words)
    config = rig.dir / "c.toml"
    text = '[[disk]]\nname = "d0"\nformat = "ram"\nsize = 1048576\n[[export]]\ntype = "nbd"\nname = "n0"\ndisk = "d0"\n'
    config.write_text(f'{text}listen = "unix:{rig.dir}/n0.nbd"\nwritable = true\ntls-certificates = "{folder}"\ntls-verify-peer = false\n')
    r.run([r.binary("vshunt"), "config", "check", config])
    daemon = r.Daemon(rig, "--config", config, name="config")
    reads_nothing = c.Secure(rig.dir / "n0.nbd", ssl.create_default_context(cafile=authority.cert))
    with c.Client(reads_nothing, "n0") as client:
        client.write(0, b"c" * 512)
    shown = daemon.cli("config", "show").stdout
    r.require(f'tls-certificates = "{folder}"' in shown and "tls-verify-peer = false" in shown, shown)
    e.ends_well(daemon)
    (folder / "server-key.pem").unlink()
    checked = r.run([r.binary("vshunt"), "config", "check", config], check=False)
    r.require("export n0" in checked.stderr and "server-key.pem" in checked.stderr, f"{checked}")


def test_an_export_that_is_added_while_the_daemon_runs_and_a_new_certificate(rig, authority):
    """The daemon is in its sandbox, and may open neither folder before the export is added."""
    daemon = r.Daemon(rig, "--disk", "name=d0,format=ram,size=64M", name="later")
    folder = authority.sign("server")
    for turn in range(2):
        daemon.cli("export", "add", e.export(rig, tls_certificates=folder))
        daemon.at = c.Secure(rig.dir / "n0.nbd", authority.context())
        reads_back(daemon)
        with c.Client(daemon.at, "n0") as client:
            shown = client.socket.getpeercert(binary_form=True)
            wanted = ssl.PEM_cert_to_DER_cert((folder / "server-cert.pem").read_text())
            r.require(shown == wanted, "another certificate is shown")
            if turn == 0:
                # It is renewed in place, and counts when the export is added again.
                new = authority.sign("server")
                for name in ("server-cert.pem", "server-key.pem"):
                    (folder / name).write_bytes((new / name).read_bytes())
            daemon.cli("export", "remove", "n0", "--force")
            r.require(client.ends(), "the client is still connected")
        r.wait_for("the threads of TLS end", lambda: not carriers(daemon))
    daemon.cli("disk", "remove", "d0")
    e.ends_well(daemon)


# Handshakes.


def test_nothing_is_possible_without_tls(rig, authority):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name="required")
    name = c.text("n0")
    with greeted(daemon) as client:
        for option, data in (
            (c.LIST, b""),
            (c.STRUCTURED, b""),
            (c.EXTENDED, b""),
            (c.LIST_META, name + bytes(4)),
            (c.SET_META, name + bytes(4)),
            (c.INFO, name + bytes(2)),
            (c.GO, name + bytes(2)),
            (77, b"x"),
        ):
            found = client.answers(option, data)
            r.require(found[-1][0] == c.TLS_REQUIRED and len(found) == 1, f"option {option}: {found}")
        r.require(client.answers(c.TLS, b"x")[-1][0] == c.INVALID, "STARTTLS with data")
        r.require(client.answers(c.ABORT)[-1][0] == c.ACK and client.ends(), "it cannot end its handshake")
    with greeted(daemon) as client:
        client.option(c.EXPORT_NAME, b"n0")
        r.require(client.ends(), "it is served without TLS")
    # Within TLS, there is no second one, and what was asked for before does not count.
    with greeted(daemon) as client:
        client.answers(c.STRUCTURED)
        client.need(c.TLS)
        client.tls = daemon.at.tls
        client.start_tls()
        r.require(client.answers(c.TLS)[-1][0] == c.INVALID, "TLS within TLS")
        r.require(client.answers(c.SET_META, name + bytes(4))[-1][0] == c.INVALID, "structured replies from before TLS count")
        client.go("n0")
        r.require(client.read(0, 512) == bytes(512), "it reads as something else")
    rest(daemon)
    e.ends_well(daemon)
    open_one = e.serve(rig, e.disk_of(rig, "ram"), name="open")
    with greeted(open_one) as client:
        r.require(client.answers(c.TLS)[-1][0] == c.POLICY, "an export without TLS begins it")
        client.go("n0")
    e.ends_well(open_one)


def options(*wanted):
    return b"".join(struct.pack(">QII", c.OPTION, option, len(data)) + data for option, data in wanted)


@pytest.mark.parametrize("when", ("at-once", "after"))
def test_what_others_put_behind_starttls_ends_the_connection(rig, authority, when):
    """As someone on the way can: `at-once` with the option, `after` its answer, in front of the client's own bytes."""
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name=f"inject-{when}")
    injected = options((c.STRUCTURED, b""), (c.GO, c.text("n0") + bytes(2)))
    with greeted(daemon) as client:
        if when == "at-once":
            client.send(options((c.TLS, b"")) + injected)
            logs(daemon, "without TLS behind NBD_OPT_STARTTLS")
        else:
            client.need(c.TLS)
            client.send(injected)
            # The connection may have ended already.
            with contextlib.suppress(c.Gone):
                client.send(memory_hello(daemon.at.tls))
            logs(daemon, "breaks TLS")
        answer = b""
        with contextlib.suppress(c.Gone):
            while len(answer) < 4096:
                answer += client.take(1)
        r.require(struct.pack(">QI", c.REPLY, c.GO) not in answer, f"what was injected is answered: {answer}")
    reads_back(daemon)
    e.ends_well(daemon)


RECORD = (1 << 14) + 256


def shakes(way, client, context):
    """Begins TLS in a way that must fail."""
    client.need(c.TLS)
    if way == "garbage":
        client.send(b"\xde\xad\xbe\xef" * 64)
    elif way == "huge":
        # A ClientHello of 16 MiB.
        client.send(struct.pack(">BHHI", 22, 0x301, 1 << 14, 0x01FFFFFF) + bytes((1 << 14) - 4))
        for _ in range(1024):
            client.send(struct.pack(">BHH", 22, 0x301, 1 << 14) + bytes(1 << 14))
    elif way == "long-record":
        client.send(struct.pack(">BHH", 22, 0x301, 0xFFFF) + bytes(0xFFFF))
    elif way == "empty-records":
        for _ in range(100_000):
            client.send(struct.pack(">BHH", 22, 0x301, 0) * 64)
    elif way == "alerts":
        for _ in range(100_000):
            client.send(struct.pack(">BHHBB", 21, 0x303, 2, 1, 90) * 64)
    elif way == "old":
        context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        client.tls = context
        client.start_tls()
    elif way == "cut":
        hello = memory_hello(context)
        client.send(hello[: len(hello) // 2])
        client.finish()
    elif way == "reset":
        client.send(memory_hello(context))
        client.close()
        raise c.Gone


def memory_hello(context):
    """The first message of a client."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(into, out, server_hostname="localhost").do_handshake()
    return out.read()


@pytest.mark.parametrize("way", ("garbage", "huge", "long-record", "empty-records", "alerts", "old", "cut", "reset"))
def test_handshakes_that_fail(rig, authority, way):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name=f"shake-{way}")
    memory = nbd_tls.memory_kib(daemon)
    for _ in range(20):
        with greeted(daemon) as client, contextlib.suppress(c.Gone):
            shakes(way, client, authority.context())
            r.require(client.ends(), "the client is still connected")
    reads_back(daemon)
    memory = nbd_tls.memory_kib(daemon) - memory
    r.require(memory < 16 << 10, f"the daemon has {memory} KiB more than before")
    if way not in ("cut", "reset"):
        logs(daemon, "breaks TLS")
    rest(daemon)
    e.ends_well(daemon)


def test_handshakes_that_hang_end_after_a_while(rig, authority):
    """Silent before TLS and in it, and single bytes. Others are served, and the daemon has nothing to do."""
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name="hang")
    hello = memory_hello(authority.context())
    begin = time.monotonic()
    silent, half, dripping = greeted(daemon), greeted(daemon), greeted(daemon)
    for client in (half, dripping):
        client.need(c.TLS)
    half.send(hello[:50])
    with contextlib.suppress(c.Gone):
        for byte in hello:
            dripping.send(bytes([byte]))
            time.sleep(0.1)
            if byte == hello[0]:
                reads_back(daemon)
            if time.monotonic() > begin + 30:
                break
    for client in (silent, half, dripping):
        client.socket.settimeout(60)
        r.require(client.ends(), "the client is still connected")
    r.require(time.monotonic() - begin > 5, "they were given up at once")
    logs(daemon, "handshake took more than")
    rest(daemon)
    e.ends_well(daemon)


def test_hundreds_of_half_handshakes_keep_nobody_out(rig, authority):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name="hundreds")
    memory, waiting = nbd_tls.memory_kib(daemon), []
    hello = memory_hello(authority.context())
    for _ in range(300):
        client = greeted(daemon)
        client.need(c.TLS)
        client.send(hello)
        waiting.append(client)
    reads_back(daemon)
    memory = nbd_tls.memory_kib(daemon) - memory
    r.require(memory < 32 << 10, f"the daemon has {memory} KiB more than before")
    threads = len(r.thread_ids(daemon.child.pid))
    r.require(threads < 40, f"{threads} threads")
    for client in waiting:
        client.close()
    rest(daemon)
    e.ends_well(daemon)


# Connections.


def test_idle_connections_cost_no_cpu_and_little_memory(rig, authority):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name="idle")
    memory = nbd_tls.memory_kib(daemon)
    clients = [c.Client(daemon.at, "n0") for _ in range(16)]
    for client in clients:
        r.require(client.read(0, 4096) == bytes(4096), "it reads as something else")
    memory = nbd_tls.memory_kib(daemon) - memory
    r.require(memory < 16 << 10, f"16 connections take {memory} KiB")
    threads = carriers(daemon)
    r.require(len(threads) == 16, f"{len(threads)} threads")
    time.sleep(0.3)
    used = nbd_tls.cpu_s(threads)
    time.sleep(2)
    used = nbd_tls.cpu_s(threads) - used
    r.require(used < 0.1, f"threads of idle connections use {used} s of CPU time")
    with c.Client(os.fspath(daemon.at)) as more:
        more.greet()
        more.need(c.TLS)
        more.tls = daemon.at.tls
        more.start_tls()
        found = more.answers(c.GO, c.text("n0") + bytes(2))
        r.require(found[-1][0] == c.POLICY and b"16 clients" in found[-1][1], f"{found}")
    for client in clients:
        client.close()
    rest(daemon)
    e.ends_well(daemon)


@pytest.mark.parametrize("reads", (True, False), ids=("reads", "never-reads"))
def test_a_flood_harms_its_own_connection_only(rig, authority, reads):
    """Requests without end. The thread of a connection that does not read waits, and ends with its client."""
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name=f"flood-{reads}", workers=2)
    steady, memory = c.Client(daemon.at, "n0"), nbd_tls.memory_kib(daemon)
    data = random.Random(8).randbytes(MIB)
    steady.write(0, data)
    pid = os.fork()
    if pid == 0:
        try:
            flood(daemon, reads)
        finally:
            os._exit(0)
    r.wait_for("a second thread of TLS", lambda: len(carriers(daemon)) == 2)
    for _ in range(100):
        r.require(steady.read(0, MIB) == data, "another client reads something else")
    if not reads:

        def rest_for_a_second():
            used = nbd_tls.cpu_s(carriers(daemon))
            time.sleep(1)
            return nbd_tls.cpu_s(carriers(daemon)) - used < 0.2

        r.wait_for("the threads of TLS use no CPU time while nobody takes anything", rest_for_a_second)
    memory = nbd_tls.memory_kib(daemon) - memory
    r.require(memory < 80 << 10, f"the daemon has {memory} KiB more than before")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    r.wait_for("its queue is free", lambda: len(e.running(daemon)) == 1)
    r.wait_for("its thread ends", lambda: len(carriers(daemon)) == 1)
    steady.close()
    rest(daemon)
    e.ends_well(daemon)


def flood(daemon, reads):
    client, turn = c.Client(daemon.at, "n0"), 0
    client.socket.settimeout(0.01 if reads else 60)
    while True:
        turn += 1
        at = MIB + turn % 40 * MIB
        try:
            client.send(client.header(c.READ, at, MIB) * 16)
            while reads and client.socket.recv(1 << 20):
                pass
        except (TimeoutError, ssl.SSLWantReadError):
            pass


@pytest.mark.root
def test_clients_that_are_killed_free_their_queue_and_their_thread(rig, authority, pytestconfig):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "raw", "kills"), queues=4, workers=2, name="kills")
    steady = c.Client(daemon.at, "n0")
    data = random.Random(1).randbytes(MIB)
    steady.write(0, data)
    fds, chance = len(os.listdir(f"/proc/{daemon.child.pid}/fd")), random.Random(2)
    for turn in range(pytestconfig.getoption("--kills") or 20):
        pid = os.fork()
        if pid == 0:
            try:
                flood(daemon, turn % 2)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0.01, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        r.require(steady.read(0, MIB) == data, "another client reads something else")
        r.wait_for("its queue is free", lambda: len(e.running(daemon)) == 1)
        r.wait_for("its thread ends", lambda: len(carriers(daemon)) == 1)
    left = len(os.listdir(f"/proc/{daemon.child.pid}/fd"))
    r.require(left <= fds + 2, f"{left} descriptors, {fds} before")
    steady.close()
    rest(daemon)
    e.ends_well(daemon)


@pytest.mark.parametrize("way", ("records", "change-cipher", "cut-record"))
def test_what_is_no_tls_ends_a_connection(rig, authority, way):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name=f"lie-{way}")
    client = c.Client(daemon.at, "n0")
    client.write(0, b"x" * 4096)
    below = socket.socket(fileno=os.dup(client.socket.fileno()))
    below.sendall({"records": b"\xde\xad\xbe\xef" * 64, "change-cipher": b"\x14\3\3\0\1\1" * 64, "cut-record": b"\x17\3\3\1\0abc"}[way])
    if way == "cut-record":
        below.shutdown(socket.SHUT_WR)
    r.require(client.ends(), "the client is still connected")
    rest(daemon)
    if way != "cut-record":
        logs(daemon, "is disconnected: TLS")
    reads_back(daemon)
    e.ends_well(daemon)


def test_a_client_that_takes_its_last_answers_late_gets_them_all_or_holds_its_queue_for_a_while(rig, authority):
    """The queue ends when the thread has the last answers. It is free when the client has them, or after 10 s."""
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), queues=1, name="late")
    # More than the socket of the client takes, and less than the thread and its sockets have room
    # for.
    size = 100 << 10
    data = random.Random(4).randbytes(size)
    for takes in (True, False):
        client = c.Client(daemon.at, "n0")
        client.write(0, data)
        for _ in range(4):
            client.ask(c.READ, 0, size)
        client.ask(c.DISC)
        r.wait_for("the queue has ended", lambda: takes or not e.running(daemon))
        if takes:
            time.sleep(1)
            for _ in range(4):
                cookie, error, found = client.reply()
                r.require(error == 0 and found == data, f"reply {cookie} differs")
            r.require(client.ends(), "the client is still connected")
        r.wait_for("the thread ends", lambda: not carriers(daemon))
        client.close()
        reads_back(daemon)
        rest(daemon)
    e.ends_well(daemon)


def test_removal_and_the_end_of_the_daemon_with_clients_that_do_not_read(rig, authority):
    daemon = e.serve_tls(rig, authority, e.disk_of(rig, "ram"), name="remove")
    for last in (False, True):
        clients = [c.Client(daemon.at, "n0") for _ in range(3)]
        for client in clients[1:]:
            client.socket.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                while True:
                    client.send(client.header(c.READ, 0, MIB) * 64)
        if last:
            e.ends_well(daemon)
        else:
            daemon.cli("export", "remove", "n0", "--force")
            # The system lists a thread for a moment after it has ended.
            r.wait_for("no thread is left", lambda: not carriers(daemon))
            daemon.cli("export", "add", e.export(rig, tls_certificates=authority.sign("server")))
        for client in clients:
            client.socket.settimeout(60)
            r.require(client.ends(), "the client is still connected")


def test_over_tcp_a_kill_of_the_daemon_is_seen_and_vshunt_connects_again(rig, authority):
    daemon = over_tcp(rig, authority, "again", "raw")
    uri = f"nbds://localhost:{daemon.port}/n0?tls-certificates={authority.sign('client')}"
    client = r.Daemon(rig, "--disk", f"name=d0,uri={uri},reconnect-delay=120", "--export", n.export(rig), name="of-again")
    load = r.Child(rig, "load-again", n.load(rig, "--runtime", r.FOREVER))

    def requests():
        r.require(load.running(), f"vshunt-bench ended with {load.process.returncode}: {load.tail()}")
        return sum(q["requests"] for q in client.status()["queues"])

    for _ in range(3):
        before = requests()
        r.wait_for("requests", lambda before=before: requests() > before + 100)
        daemon.child.kill()
        daemon.start()
    before = requests()
    r.wait_for("requests after the last kill", lambda: requests() > before + 100)
    code = load.interrupt(120)
    r.require(code == 0, f"vshunt-bench ended with {code}: {load.tail()}")
    e.ends_well(client)
    r.require(Path(f"/proc/{daemon.child.pid}").exists(), "the server has ended")
    e.ends_well(daemon)
