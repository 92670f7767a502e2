"""Real servers under the permissions that `isthmus access` writes, with TLS by an authority of the test's own."""

import datetime
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from isthmus_services.cli import main
from isthmus_services.servers import free_ports, s3_server

BUCKET, PREFIX = "bucket", "run"
LEARNERS = ("eu-1", "us-1")


@dataclass(frozen=True)
class Servers:
    """Where they are, and where each participant's credentials lie."""

    folder: Path
    s3: str
    redis: str
    authority: Path

    def password(self, user: str) -> str:
        """Return a user's password of Redis."""
        return (self.folder / f"bus-{user}").read_text().strip()

    def secret(self, user: str) -> str:
        """Return a user's secret key of the store."""
        return (self.folder / f"store-{user}.key").read_text().strip()

    def environment(self, user: str, bus_user: str) -> dict[str, str]:
        """Return what a participant's process is told, none of it on its command line."""
        return {
            "AWS_ENDPOINT_URL": self.s3,
            "AWS_REGION": "us-east-1",
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / f"store-{user}.credentials"),
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_CA_BUNDLE": str(self.authority),
            "AWS_EC2_METADATA_DISABLED": "true",
            "ISTHMUS_RUN": f"s3://{BUCKET}/{PREFIX}",
            "ISTHMUS_BUS": f"{self.redis}?ssl_ca_certs={self.authority}",
            "ISTHMUS_BUS_USER": bus_user,
            "ISTHMUS_BUS_PASSWORD_FILE": str(self.folder / f"bus-{bus_user}"),
            "ISTHMUS_LOG_FORMAT": "text",
        }


def redis7() -> str:
    """Return a redis-server that knows permissions to read or write alone; skip where there is none."""
    found = shutil.which("redis-server")
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout if found else ""
    if found is None or int(said.partition("v=")[2].partition(".")[0] or 0) < 7:
        if os.environ.get("ISTHMUS_REQUIRE_REDIS7"):
            pytest.fail("redis-server 7 or newer is required here, and not on PATH")
        pytest.skip("needs redis-server 7 or newer on PATH")
    return found


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """Run SeaweedFS and Redis with TLS, and users as `isthmus access` makes them."""
    secrets = folder / "secrets"
    words = [word for name in LEARNERS for word in ("--learner", name)]
    made = ["access", str(secrets), *words, "--in-bucket", BUCKET, "--prefix", PREFIX, "--policies", "seaweedfs"]
    assert main(made) == 0
    authority, certificate, key = certificates(folder / "tls")
    (port,) = free_ports(1)
    redis = [
        redis7(), "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
        "--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(authority),
        "--tls-auth-clients", "no", "--aclfile", str(secrets / "users.acl"), "--maxmemory", "64mb",
        "--maxmemory-policy", "noeviction", "--proto-max-bulk-len", "1mb",
    ]  # fmt: skip
    operator = (secrets / "store-password").read_text().strip()
    (https,) = free_ports(1)
    with s3_server(
        folder,
        port=https,
        credentials=("isthmus", operator),
        arguments=(
            f"-s3.config={secrets / 'store-seaweedfs.json'}", f"-s3.cert.file={certificate}", f"-s3.key.file={key}",
        ),
    ) as s3:  # fmt: skip
        with (folder / "redis.log").open("wb") as out:
            process = subprocess.Popen(redis, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 30
            while b"Ready to accept" not in (folder / "redis.log").read_bytes():
                assert process.poll() is None, (folder / "redis.log").read_text()
                assert time.monotonic() < until, "Redis does not start"
                time.sleep(0.05)
            yield Servers(secrets, s3.url.replace("http://", "https://"), f"rediss://127.0.0.1:{port}", authority)
        finally:
            process.terminate()
            process.wait(10)


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Make an authority, and a certificate of 127.0.0.1 by it; return the authority's, the certificate and its key."""
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC)

    def builder(name: str, issuer: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    own, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    root = (
        builder("the test's authority", "the test's authority", own.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .sign(own, hashes.SHA256())
    )
    leaf = (
        builder("127.0.0.1", "the test's authority", server.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(own.public_key()), critical=False)
        .sign(own, hashes.SHA256())
    )
    paths = folder / "authority.pem", folder / "server.pem", folder / "server.key"
    for path, found in zip(paths, (root, leaf), strict=False):
        path.write_bytes(found.public_bytes(serialization.Encoding.PEM))
    paths[2].write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths
