"""A private certificate authority and certificates of servers on this machine, for tests of TLS."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A certificate authority; clients trust `file` (PEM)."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"isthmus tests: {name}")])
        made = self._signed(self._name, self._key.public_key(), ca=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: str, host: str = "127.0.0.1") -> tuple[Path, Path]:
        """Return the files (PEM) of a server's certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = self._signed(subject, key.public_key(), ca=False, host=host)
        chain, secret = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        plain = (serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
        secret.chmod(0o600)
        return chain, secret

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, ca: bool, host: str = ""
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if host:
            address = x509.IPAddress(ipaddress.ip_address(host))
            made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return made.sign(self._key, hashes.SHA256())
