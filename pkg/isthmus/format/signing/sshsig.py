"""OpenSSH's signature format (PROTOCOL.sshsig). The signed bytes name the kind of object; any `ssh-keygen` checks them.

    signed = "SSHSIG" | namespace | "" | "sha512" | SHA-512(message)        each but the first with its length before it

Only the 64 bytes of the Ed25519 signature are stored, because the rest of OpenSSH's armored file is known anyway.
"""

import base64
import hashlib
import textwrap
from functools import lru_cache
from typing import TYPE_CHECKING

from isthmus.errors import IsthmusError
from isthmus.format.signing.points import is_small_order

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

MAGIC = b"SSHSIG"
HASH = "sha512"
KEY_TYPE = "ssh-ed25519"
KEY_BYTES = 32


class Forged(IsthmusError):
    """The signature is not one of these bytes by this key."""


def namespace_of(kind: str) -> str:
    """Return the namespace in which objects of a kind are signed, so that no signature is valid for another kind."""
    return f"isthmus-{kind.lower()}"


def string(data: bytes | str) -> bytes:
    """Return text or bytes in SSH's wire format: preceded by four bytes of length."""
    raw = data.encode() if isinstance(data, str) else data
    return len(raw).to_bytes(4, "big") + raw


def to_sign(namespace: str, message: bytes) -> bytes:
    """Return the bytes that an Ed25519 key signs for a message in a namespace."""
    return MAGIC + string(namespace) + string(b"") + string(HASH) + string(hashlib.sha512(message).digest())


def verify(author: bytes, namespace: str, message: bytes, signature: bytes) -> None:
    """Raise `Forged` unless `author` [32 bytes] signed a message in a namespace."""
    from cryptography.exceptions import InvalidSignature

    if is_small_order(author) or is_small_order(signature[:32]):
        raise Forged("a key or a signature of small order: nobody made it by signing")
    try:
        _key(author).verify(signature, to_sign(namespace, message))
    except (InvalidSignature, ValueError):
        raise Forged(f"no {namespace} signature of these bytes by this key") from None


@lru_cache(maxsize=4096)
def _key(author: bytes) -> "Ed25519PublicKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(author)


def key_blob(author: bytes) -> bytes:
    """Return a public key in OpenSSH's binary encoding."""
    return string(KEY_TYPE) + string(author)


def armored(author: bytes, namespace: str, signature: bytes) -> str:
    """Return the armored signature file that `ssh-keygen -Y verify -s` reads."""
    blob = (
        MAGIC
        + (1).to_bytes(4, "big")
        + string(key_blob(author))
        + string(namespace)
        + string(b"")
        + string(HASH)
        + string(string(KEY_TYPE) + string(signature))
    )
    lines = textwrap.wrap(base64.b64encode(blob).decode(), 70)
    return "\n".join(["-----BEGIN SSH SIGNATURE-----", *lines, "-----END SSH SIGNATURE-----", ""])
