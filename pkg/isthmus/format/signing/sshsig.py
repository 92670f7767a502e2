"""OpenSSH's signature format (PROTOCOL.sshsig): what is signed names the kind of object; any `ssh-keygen` checks it.

    signed = "SSHSIG" | namespace | "" | "sha512" | SHA-512(message)        each but the first with its length before it

The armored file around a signature says nothing that is not known from elsewhere, so the 64 bytes of Ed25519 are all
that is kept.
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
SIGNATURE_BYTES = 64
KEY_BYTES = 32


class Forged(IsthmusError):
    """A signature that is none by this key of these bytes."""


def namespace_of(kind: str) -> str:
    """Return the namespace that objects of a kind are signed in: what was signed as one kind is never another."""
    return f"isthmus-{kind.lower()}"


def string(data: bytes | str) -> bytes:
    """Return text or bytes as SSH's wire format has them: four bytes of length before them."""
    raw = data.encode() if isinstance(data, str) else data
    return len(raw).to_bytes(4, "big") + raw


def to_sign(namespace: str, message: bytes) -> bytes:
    """Return the bytes that an Ed25519 key signs for a message in a namespace."""
    return MAGIC + string(namespace) + string(b"") + string(HASH) + string(hashlib.sha512(message).digest())


def verify(author: bytes, namespace: str, message: bytes, signature: bytes) -> None:
    """Return if `author` [32 bytes] signed a message in a namespace. Raises `Forged`."""
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
    """Return a public key as OpenSSH encodes it."""
    return string(KEY_TYPE) + string(author)


def armored(author: bytes, namespace: str, signature: bytes) -> str:
    """Return the file that `ssh-keygen -Y verify -s` reads."""
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
