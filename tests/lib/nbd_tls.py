"""TLS for tests of NBD: certificates, and what threads that carry it cost."""

import os
import ssl
from pathlib import Path

import rig as r


class Authority:
    """A certificate authority, and the folders with what it has signed."""

    def __init__(self, rig, name="ca"):
        self.openssl, self.dir = r.tool("openssl", "openssl"), rig.dir / name
        self.dir.mkdir()
        self.signed = 0
        self.key, self.cert = self.dir / "ca-key.pem", self.dir / "ca-cert.pem"
        self.run("req", "-x509", "-nodes", *self.new(self.key), "-subj", f"/CN={name}", "-days", "9", "-out", self.cert)

    def run(self, *arguments):
        r.run([self.openssl, *arguments])

    def new(self, key):
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", key]

    def sign(self, kind, names="DNS:localhost,IP:127.0.0.1", days=9):
        """Returns a folder with `KIND-cert.pem`, its key and the certificate of the authority."""
        self.signed += 1
        folder = self.dir / f"{kind}-{self.signed}"
        folder.mkdir()
        (folder / "ca-cert.pem").write_bytes(self.cert.read_bytes())
        key, request, cert, more = (folder / name for name in (f"{kind}-key.pem", "request", f"{kind}-cert.pem", "more"))
        more.write_text(f"subjectAltName={names}\nbasicConstraints=CA:false\n")
        self.run("req", "-nodes", *self.new(key), "-subj", "/CN=of-a-test", "-out", request)
        authority = ["-CA", self.cert, "-CAkey", self.key, "-CAcreateserial"]
        self.run("x509", "-req", "-in", request, *authority, "-days", days, "-extfile", more, "-out", cert)
        return folder

    def context(self, folder=None):
        """What a client begins TLS with. Without `folder` it has a new certificate."""
        folder = folder or self.sign("client")
        context = ssl.create_default_context(cafile=self.cert)
        context.load_cert_chain(folder / "client-cert.pem", folder / "client-key.pem")
        return context

    def revoke(self, *certificates):
        """Revokes these, and returns the list of what was revoked."""
        config, listed = self.dir / "ca.conf", self.dir / "crl.pem"
        (self.dir / "index").touch()
        (self.dir / "number").write_text("01\n")
        keys = {"database": "index", "crlnumber": "number"}
        lines = ["[ca]", "default_ca=d", "[d]", "default_md=sha256", "default_crl_days=9"]
        config.write_text("\n".join([*lines, *(f"{key}={self.dir / name}" for key, name in keys.items())]) + "\n")
        own = ["-config", config, "-cert", self.cert, "-keyfile", self.key]
        for certificate in certificates:
            self.run("ca", *own, "-revoke", certificate)
        self.run("ca", *own, "-gencrl", "-out", listed)
        return listed


def carriers(daemon, name="vshunt-nbd-tls"):
    """The folders in /proc of the threads with this name, that of a client unless given."""
    return [task for task, comm in r.threads(daemon.child.pid, "comm") if comm.strip() == name]


def cpu_s(tasks):
    """The CPU time of threads."""
    # Behind the name: fields 14 and 15 of proc_pid_stat(5).
    fields = [(task / "stat").read_text().rpartition(")")[2].split() for task in tasks]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def memory_kib(daemon):
    """What the daemon has in memory."""
    lines = Path(f"/proc/{daemon.child.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
