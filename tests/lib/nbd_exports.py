"""Daemons that serve disks to NBD clients, for tests."""

import nbd_client as c
import rig as r

SIZE = 64 << 20


def export(rig, name="n0", of="d0", **keys):
    """The value of --export for a disk."""
    keys = {"listen": f"unix:{rig.dir / (name + '.nbd')}", "writable": "on", **keys}
    more = "".join(f",{key.replace('_', '-')}={value}" for key, value in keys.items())
    return f"type=nbd,name={name},disk={of}{more}"


def serve(rig, disk, *more, name="nbd", **keys):
    """A daemon that serves `disk`, the value of --disk without its name, as `n0`."""
    daemon = r.Daemon(rig, "--disk", f"name=d0,{disk}", "--export", export(rig, **keys), *more, name=name)
    daemon.at = rig.dir / "n0.nbd"
    return daemon


def serve_tls(rig, authority, disk, *more, **keys):
    """As `serve`, with TLS. Clients that connect to `daemon.at` have a certificate of the authority."""
    daemon = serve(rig, disk, *more, tls_certificates=authority.sign("server"), **keys)
    daemon.at = c.Secure(daemon.at, authority.context())
    return daemon


def uri(daemon, export="n0"):
    return f"nbd+unix:///{export}?socket={daemon.at}"


def disk_of(rig, kind, name="d0", size=SIZE):
    """The value of --disk for a new disk of that kind, without its name."""
    if kind in ("ram", "null"):
        return f"format={kind},size={size}"
    if kind == "qcow2":
        path = rig.dir / f"{name}.qcow2"
        r.run([r.binary("vshunt"), "image", "create", "-f", "qcow2", path, str(size)])
        return f"format=qcow2,file={path}"
    path = rig.image(f"{name}.img", size, rig.memory_dir() if kind == "memory" else None)
    return f"format=raw,file={path}" + (",direct=off" if kind == "buffered" else "")


def ends_well(daemon):
    code = daemon.child.stop()
    r.require(code == 0, f"vshunt ended with {code}: {daemon.child.tail()}")


def running(daemon, export="n0"):
    """The queues of the export that have a client."""
    return [q for q in daemon.status()["queues"] if q["export"] == export and q["state"] == "running"]
