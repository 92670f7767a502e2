"""Keys and signatures agree with OpenSSH, and invalid ones are rejected even if the library accepts them."""

import os
import subprocess
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from isthmus.errors import InputError
from isthmus.format.signing import Forged, armored, fingerprint, public_key, public_line, read_signer, verify
from isthmus.format.signing.keys import PASSPHRASE, PASSPHRASE_FILE, new_signer, read_public, write_signer
from isthmus.format.signing.points import SMALL_ORDER, P, is_small_order
from isthmus.format.signing.sshsig import to_sign

SPACE = "isthmus-test"
IDENTITY = (1).to_bytes(32, "little")


def ssh_keygen(*words: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["ssh-keygen", *words], input=given, capture_output=True, timeout=60, check=False)


@pytest.fixture
def openssh_key(tmp_path: Path) -> Path:
    path = tmp_path / "id_ed25519"
    assert ssh_keygen("-q", "-t", "ed25519", "-N", "", "-C", "somebody", "-f", str(path)).returncode == 0
    return path


def test_openssh_checks_what_we_sign(tmp_path: Path) -> None:
    signer, message = new_signer(), b"\x00\xff something \n"
    (tmp_path / "allowed").write_text(f"eu-1 {public_line(signer.author)}\n")
    (tmp_path / "sig").write_text(armored(signer.author, SPACE, signer.sign(SPACE, message)))

    def checked(namespace: str, given: bytes) -> int:
        words = ["-f", str(tmp_path / "allowed"), "-I", "eu-1", "-n", namespace, "-s", str(tmp_path / "sig")]
        return ssh_keygen("-Y", "verify", *words, given=given).returncode

    assert checked(SPACE, message) == 0
    assert checked(SPACE, message + b"!") != 0
    assert checked("isthmus-other", message) != 0, "a signature is valid in one namespace only"


def test_we_sign_with_keys_of_openssh_as_it_does(openssh_key: Path, tmp_path: Path) -> None:
    message = tmp_path / "m"
    message.write_bytes(b"hello")
    assert ssh_keygen("-Y", "sign", "-f", str(openssh_key), "-n", SPACE, str(message)).returncode == 0
    signer = read_signer(openssh_key)
    # Ed25519 uses no randomness: the same key and bytes give the same signature.
    theirs = Path(f"{message}.sig").read_text().split()
    assert armored(signer.author, SPACE, signer.sign(SPACE, b"hello")).split() == theirs
    line = openssh_key.with_suffix(".pub").read_text()
    assert public_key(line) == read_public(line) == read_public(str(openssh_key.with_suffix(".pub"))) == signer.author
    assert fingerprint(signer.author) in ssh_keygen("-l", "-f", str(openssh_key)).stdout.decode()


def test_keys_we_write_are_read_by_openssh(tmp_path: Path) -> None:
    signer = new_signer()
    write_signer(tmp_path / "k" / "eu-1", signer, "eu-1")
    assert read_signer(tmp_path / "k" / "eu-1") == signer
    said = ssh_keygen("-y", "-f", str(tmp_path / "k" / "eu-1")).stdout.decode()
    assert public_key(said) == signer.author
    assert (tmp_path / "k" / "eu-1").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match="there is a key already"):
        write_signer(tmp_path / "k" / "eu-1", new_signer(), "eu-1")
    assert read_signer(tmp_path / "k" / "eu-1") == signer


def test_an_encrypted_key_is_opened_by_what_the_environment_says(tmp_path: Path) -> None:
    path = tmp_path / "id"
    assert ssh_keygen("-q", "-t", "ed25519", "-N", "open sesame", "-f", str(path)).returncode == 0
    with pytest.raises(InputError, match=PASSPHRASE):
        read_signer(path, {})
    with pytest.raises(InputError, match="this is no OpenSSH private key, or the passphrase is wrong"):
        read_signer(path, {PASSPHRASE: "wrong"})
    (tmp_path / "secret").write_text("open sesame\n")
    by_word, by_file = (
        read_signer(path, {PASSPHRASE: "open sesame"}),
        read_signer(path, {PASSPHRASE_FILE: str(tmp_path / "secret")}),
    )
    assert by_word == by_file
    assert public_key(path.with_suffix(".pub").read_text()) == by_word.author
    with pytest.raises(InputError, match="both set"):
        read_signer(path, {PASSPHRASE: "open sesame", PASSPHRASE_FILE: str(tmp_path / "secret")})


def test_a_secret_that_an_orchestrator_mounted_may_be_its_groups_and_nobody_elses(
    openssh_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.getuid()
    for mode, we, fits in [
        (0o600, ours, True),
        (0o640, ours, False),
        (0o640, ours + 1, True),
        (0o644, ours + 1, False),
    ]:
        openssh_key.chmod(mode)
        monkeypatch.setattr(os, "getuid", lambda other=we: other)
        if fits:
            read_signer(openssh_key)
            continue
        with pytest.raises(InputError, match=f"others may read it \\(mode {mode:o}\\)"):
            read_signer(openssh_key)


def test_what_is_no_key_of_ours_is_refused_with_a_remedy(openssh_key: Path, tmp_path: Path) -> None:
    assert ssh_keygen("-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(tmp_path / "rsa")).returncode == 0
    (tmp_path / "junk").write_bytes(os.urandom(64))
    (tmp_path / "junk").chmod(0o600)
    with pytest.raises(InputError, match="only Ed25519 keys can sign"):
        read_signer(tmp_path / "rsa")
    with pytest.raises(InputError, match="no OpenSSH private key"):
        read_signer(tmp_path / "junk")
    with pytest.raises(InputError, match="keys new"):
        read_signer(tmp_path / "nowhere")
    with pytest.raises(InputError, match="this is a public key"):
        read_signer(openssh_key.with_suffix(".pub"))
    openssh_key.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        read_signer(openssh_key)
    for said, why in [
        ("ssh-rsa AAAA", "written ssh-ed25519"),
        ("ssh-ed25519 AAAA", "no Ed25519 public key"),
        ("ssh-ed25519 !!!", "no Ed25519 public key"),
        (public_line(IDENTITY), "small order"),
        (str(openssh_key), "private key, which must stay secret"),
        (str(tmp_path / "nowhere.pub"), "name a .pub file"),
    ]:
        with pytest.raises(InputError, match=why):
            read_public(said)


def test_a_key_shows_nothing_of_itself() -> None:
    signer = new_signer()
    raw = signer._key.private_bytes_raw()
    assert raw.hex() not in repr(signer)
    assert repr(raw)[2:-1] not in repr(signer)


# --- points of small order --------------------------------------------------------------------------------------------


def test_every_spelling_of_a_point_of_small_order_is_known() -> None:
    """By the curve's own arithmetic, the order of each listed point divides 8. Each y is also listed reduced."""
    d = -121665 * pow(121666, P - 2, P) % P

    def has_order_below_nine(y: int) -> bool:
        # Doubling in the affine y alone: y' = (y² + x²) / (1 − d x² y²) with a = −1, and x² from the curve.
        for _ in range(3):
            xx = (y * y - 1) * pow(d * y * y + 1, P - 2, P) % P
            y = (y * y + xx) * pow(1 - d * xx * y * y, P - 2, P) % P
        return y == 1

    spelled = {int.from_bytes(s, "little") & ((1 << 255) - 1) for s in SMALL_ORDER}
    assert all(has_order_below_nine(y % P) for y in spelled)
    assert len(SMALL_ORDER) == 14
    assert {y % P for y in spelled} == {y % P for y in spelled if y < P}
    assert not has_order_below_nine(int.from_bytes(new_signer().author, "little") & ((1 << 255) - 1))


def test_under_a_key_of_small_order_the_library_accepts_what_nobody_signed_and_we_do_not() -> None:
    # R = the identity and S = 0: with the identity as the key, this is valid for every message.
    forged = IDENTITY + bytes(32)
    accepted = 0
    for number in range(32):
        message = b"message %d" % number
        try:
            Ed25519PublicKey.from_public_bytes(IDENTITY).verify(forged, to_sign(SPACE, message))
            accepted += 1
        except InvalidSignature:
            pass
        with pytest.raises(Forged):
            verify(IDENTITY, SPACE, message, forged)
    assert accepted == 32, "this is why such points are rejected; a library that rejects them, too, is even better"


@pytest.mark.parametrize("point", sorted(SMALL_ORDER), ids=lambda p: p.hex()[:8] + p.hex()[-4:])
def test_no_point_of_small_order_is_a_key_or_an_r(point: bytes) -> None:
    assert is_small_order(point)
    signer = new_signer()
    good = signer.sign(SPACE, b"m")
    with pytest.raises(Forged, match="small order"):
        verify(point, SPACE, b"m", good)
    with pytest.raises(Forged, match="small order"):
        verify(signer.author, SPACE, b"m", point + good[32:])
    with pytest.raises(InputError, match="small order"):
        public_key(public_line(point))


def test_no_flipped_bit_of_a_signature_a_key_or_a_message_is_accepted() -> None:
    signer, message = new_signer(), b"sixteen bytes..."
    signature = signer.sign(SPACE, message)
    verify(signer.author, SPACE, message, signature)
    whole = signer.author + signature + message
    for bit in range(8 * len(whole)):
        other = bytearray(whole)
        other[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Forged):
            verify(bytes(other[:32]), SPACE, bytes(other[96:]), bytes(other[32:96]))
    # The same signature with S + L is another encoding: with it, one object could become two.
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(signature[32:], "little") + order
    with pytest.raises(Forged):
        verify(signer.author, SPACE, message, signature[:32] + s.to_bytes(32, "little"))
