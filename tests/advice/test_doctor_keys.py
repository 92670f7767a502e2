"""What the doctor says of an access key that the store does not know, and what comes of its advice."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from advice.doctors import Doctor, small_run
from advice.gate import OPEN, error, gate
from advice.rows import row
from isthmus_services.servers import Server


@row(
    "doctor", "store: access: …: the access key is not known there (InvalidAccessKeyId), signed with …",
    means="The store has no such access key: it was deleted, or belongs to another store.",
    do="look first whether the store came back empty (another disk?): then bring its data back; else get a new access key from the "
    "store's administrator; if `isthmus create` made this one, run that again",
    then="`ok store: access`",
)  # fmt: skip
@pytest.mark.parametrize("kept", ["environment", pytest.param("file", marks=pytest.mark.tier("all"))])
def test_a_key_that_the_store_does_not_know(
    kept: str, doctor: Doctor, moto: Server, use: Callable[[Server], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with gate(moto.url) as there:
        use(replace(moto, url=there.url, environment={**moto.environment, "AWS_ENDPOINT_URL": there.url}))
        run = small_run(f"s3://unknown-key-{os.getpid()}-{kept}/run", make=True)
        if kept == "file":
            file = tmp_path / "credentials"
            file.write_text("[default]\naws_access_key_id = deleted\naws_secret_access_key = secret\n")
            monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        there.answers = lambda method, path, size: error("InvalidAccessKeyId")
        doctor.finds(run, "--role", "collector")
        there.answers = OPEN
        doctor.finds_no_more(run, "--role", "collector")


@row(
    "doctor", "store: access: …: the secret key does not fit the access key (SignatureDoesNotMatch), signed with …",
    means="The secret key is another one than the store has for this access key.",
    do="correct the secret key, where the error says that it is from; if `isthmus create` made it, give this participant a copy "
    "of its folder again",
    then="`ok store: access`",
)  # fmt: skip
def test_a_secret_key_that_is_another_one(doctor: Doctor, moto: Server, use: Callable[[Server], None]) -> None:
    with gate(moto.url) as there:
        use(replace(moto, url=there.url, environment={**moto.environment, "AWS_ENDPOINT_URL": there.url}))
        run = small_run(f"s3://wrong-secret-{os.getpid()}/run", make=True)
        there.answers = lambda method, path, size: error("SignatureDoesNotMatch")
        doctor.finds(run, "--role", "collector")
        there.answers = OPEN
        doctor.finds_no_more(run, "--role", "collector")
