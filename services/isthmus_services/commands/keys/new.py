"""`isthmus keys new NAME`: write a new key pair in two files, as `ssh-keygen -t ed25519` would."""

from pathlib import Path

from isthmus.format.records.fields import require_name
from isthmus.format.signing import fingerprint, public_line
from isthmus.format.signing.keys import new_signer, write_signer
from isthmus_services.settings import declared


def run(settings: declared.KeysNew) -> int:
    """Write the files; print the public key and its fingerprint."""
    require_name("name of a key", settings.name)
    path = Path(settings.folder).expanduser() / settings.name
    signer = new_signer()
    write_signer(path, signer, settings.name)
    print(f"private key: {path} (keep it secret); public key: {path}.pub (send it to the run's owner):")
    print(public_line(signer.author, settings.name))
    print(fingerprint(signer.author))
    return 0
