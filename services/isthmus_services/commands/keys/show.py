"""`isthmus keys show FILE`: print the public key and the fingerprint of a key file."""

from pathlib import Path

from isthmus.errors import InputError
from isthmus.format.signing import fingerprint, public_line, read_signer
from isthmus.format.signing.keys import read_public
from isthmus_services.settings import declared


def run(settings: declared.KeysShow) -> int:
    """Print the public key and the fingerprint."""
    path = Path(settings.file).expanduser()
    try:
        private = b"PRIVATE KEY" in path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    author = read_signer(path).author if private else read_public(str(path))
    print(public_line(author, path.name.removesuffix(".pub")))
    print(fingerprint(author))
    return 0
