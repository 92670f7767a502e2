"""Ed25519 keys in OpenSSH's format: reading, writing, and fingerprints."""

import base64
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import InputError
from isthmus.format.signing.points import is_small_order
from isthmus.format.signing.sshsig import KEY_BYTES, KEY_TYPE, key_blob, to_sign

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PASSPHRASE, PASSPHRASE_FILE = "ISTHMUS_KEY_PASSPHRASE", "ISTHMUS_KEY_PASSPHRASE_FILE"
"""Environment variables with the passphrase of an encrypted private key, or with the file that holds it."""


@dataclass(frozen=True)
class Signer:
    """A private key, which signs. Its representation shows the public key only."""

    author: bytes
    """The public key [32 bytes]."""
    _key: "Ed25519PrivateKey" = field(repr=False, compare=False)

    def sign(self, namespace: str, message: bytes) -> bytes:
        """Return the signature [64 bytes] of a message in a namespace (see `sshsig`)."""
        return self._key.sign(to_sign(namespace, message))


def new_signer() -> Signer:
    """Return a new random key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return _signer(Ed25519PrivateKey.generate())


def read_signer(path: str | Path, environment: Mapping[str, str] = os.environ) -> Signer:
    """Return the key in an OpenSSH private key file. Raises `InputError`, which says what is wrong with the file.

    The environment has the passphrase of an encrypted key. Other users must not be able to read the file.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    path = Path(path).expanduser()
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"key {path}: {error.strerror}: `isthmus keys new NAME` makes one") from None
    if data.startswith(b"ssh-"):
        raise InputError(f"key {path}: this is a public key; name the private key, the file without .pub")
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and not _is_mounted(path):
        raise InputError(f"key {path}: others may read it (mode {mode & 0o777:o}): chmod 600 {path}")
    try:
        key = load_ssh_private_key(data, _passphrase(environment))
    except TypeError:
        raise InputError(
            f"key {path}: it is encrypted and no passphrase is given, or it is not and one is given: set or "
            f"unset {PASSPHRASE} or {PASSPHRASE_FILE}"
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"key {path}: this is no OpenSSH private key, or the passphrase is wrong") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"key {path}: only Ed25519 keys can sign: ssh-keygen -t ed25519, or isthmus keys new NAME")
    return _signer(key)


def _is_mounted(path: Path) -> bool:
    """Return whether an orchestrator mounted this file as a secret: it belongs to another user, and to a group of ours.

    Users outside the group must not have access to it.
    """
    found = path.stat()
    return found.st_uid != os.getuid() and not found.st_mode & stat.S_IRWXO


def _passphrase(environment: Mapping[str, str]) -> bytes | None:
    said, where = environment.get(PASSPHRASE), environment.get(PASSPHRASE_FILE)
    if said and where:
        raise InputError(f"{PASSPHRASE} and {PASSPHRASE_FILE} are both set: leave one out")
    if where:
        try:
            return Path(where).expanduser().read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise InputError(f"{PASSPHRASE_FILE} {where}: {error.strerror}") from None
    return said.encode() if said else None


def write_signer(path: Path, signer: Signer, comment: str) -> None:
    """Write a private key, which only its owner can read, and the public key beside it.

    Raises `InputError` if a file exists already, without changing it, or if a file cannot be written.
    """
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    public = path.with_name(path.name + ".pub")
    for file in (path, public):
        if file.exists():
            raise InputError(f"{file}: there is a key already; nothing was changed")
    raw = signer._key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    scratch = _scratch(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch.unlink(missing_ok=True)
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file_:
            file_.write(raw)
        os.link(scratch, path)  # the whole file or none, and never in place of another
        scratch.unlink()
        public.write_text(public_line(signer.author, comment) + "\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def kept_signer(path: Path, comment: str) -> Signer:
    """Return the key in a file, after writing the file if it is missing, and likewise the public key beside it.

    Raises `InputError` if a file cannot be read or written.
    """
    if not path.exists():
        write_signer(path, new_signer(), comment)
    signer, public = read_signer(path), path.with_name(path.name + ".pub")
    line = public_line(signer.author, comment) + "\n"
    try:
        _scratch(path).unlink(missing_ok=True)
        if not public.exists() or public.read_text() != line:
            public.write_text(line)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    return signer


def _scratch(path: Path) -> Path:
    """Return the name under which a private key is written before it gets its own."""
    return path.with_name(f".{path.name}.new")


def _signer(key: "Ed25519PrivateKey") -> Signer:
    return Signer(key.public_key().public_bytes_raw(), key)


# --- public keys ------------------------------------------------------------------------------------------------------


def public_line(author: bytes, comment: str = "") -> str:
    """Return a public key as OpenSSH writes it."""
    return f"{KEY_TYPE} {base64.b64encode(key_blob(author)).decode()} {comment}".rstrip()


def public_key(text: str) -> bytes:
    """Return the public key [32 bytes] in a line of the form `ssh-ed25519 AAAA… comment`. Raises `InputError`."""
    words = text.split()
    if len(words) < 2 or words[0] != KEY_TYPE:
        raise InputError(f"{_short(text)}: a public key is written ssh-ed25519 AAAA…, as in a .pub file")
    try:
        blob = base64.b64decode(words[1], validate=True)
    except ValueError:  # The text is not base64, or not even ASCII.
        blob = b""
    author = blob[-KEY_BYTES:]
    if blob != key_blob(author):
        raise InputError(f"{_short(text)}: this is no Ed25519 public key")
    return require_sound(author)


def read_public(said: str) -> bytes:
    """Return the public key [32 bytes] in a line, or in the .pub file of this name. Raises `InputError`."""
    if said.startswith("ssh-"):
        return public_key(said)
    path = Path(said).expanduser()
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise InputError(f"{said}: {error.strerror}: name a .pub file, or give its line in quotes") from None
    if "PRIVATE KEY" in text:
        raise InputError(f"{said}: this is a private key, which must stay secret: name the .pub file beside it")
    return public_key(text)


def require_sound(author: bytes) -> bytes:
    """Return a public key. Raises `InputError` for a key under which anybody can forge signatures."""
    if is_small_order(author):
        raise InputError("this key is a point of small order: anybody could sign under it")
    return author


def fingerprint(author: bytes) -> str:
    """Return the fingerprint of a public key, SHA256:…, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key_blob(author)).digest()).decode().rstrip("=")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:40] + "…"
