"""Ed25519 keys in OpenSSH's format, and signatures that `ssh-keygen -Y verify` can check."""

from isthmus.format.signing.keys import Signer, fingerprint, public_key, public_line, read_signer
from isthmus.format.signing.sshsig import Forged, armored, namespace_of, verify

__all__ = [
    "Forged",
    "Signer",
    "armored",
    "fingerprint",
    "namespace_of",
    "public_key",
    "public_line",
    "read_signer",
    "verify",
]
