"""What an operator states in a manifest: the file, its errors, what it stands for, and how a change is told."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isthmus.errors import InputError, RecordInvalid
from isthmus.format import digests
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.records.charter import Charter, Owner, Terms
from isthmus.format.records.objects import ManifestHeader, Source
from isthmus.learner.manifest import commit_of, processor, statement
from isthmus.log import manifests
from isthmus.log.membership import Membership
from isthmus.reasons import FINAL, LOSSLESS, PASSING, Reason

NONE = bytes(32)


def file(folder: Path, text: str) -> Path:
    path = folder / "manifest.toml"
    path.write_text(text)
    return path


WHOLE = """
code = "v1.4"
configuration = "train.yaml"
hardware = "8 × H100"

[[source]]
name = "web"
description = "pages of 2024"

[[source]]
name = "books"
path = "books.md"

[more]
licence = "CC-BY-4.0"
"""


def test_a_file_states_names_and_digests_and_holds_no_content(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_bytes(b"lr: 1")
    (tmp_path / "books.md").write_bytes(b"out of copyright")
    found = statement(file(tmp_path, WHOLE))
    assert (found.code, found.hardware) == ("v1.4", "8 × H100")
    assert found.configuration == digests.digest(b"lr: 1")
    assert found.sources == (
        Source("web", digests.digest(b"pages of 2024")),
        Source("books", digests.digest(b"out of copyright")),
    )
    assert found.more == {"licence": "CC-BY-4.0"}
    assert b"copyright" not in msgspec.msgpack.encode(found)


def test_what_is_left_out_is_what_the_machine_says(tmp_path: Path) -> None:
    found = statement(file(tmp_path, ""), lambda: "2 GPU of a name")
    assert found.hardware == f"2 GPU of a name, {processor()}"
    assert (found.configuration, found.sources, found.more) == (NONE, (), {})
    assert statement({}) == statement(file(tmp_path, ""))


def test_the_commit_of_a_folder(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == "", "it is in no repository"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert commit_of(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path) == f"{head}-dirty"


WRONG: dict[str, tuple[str, str]] = {
    "fields": ("codes = 1\nlearner = 'a'", "there is no field codes, learner: code, configuration, hardware, more, "),
    "field of a source": ("[[source]]\nname = 'a'\nurl = 'b'", "there is no field source.url"),
    "not TOML": ("code =", "not TOML"),
    "type": ("code = 1", "code: "),
    "name": ("[[source]]\nname = 'a b'\ndescription = ''", "source[0].name: "),
    "no description": ("[[source]]\nname = 'a'", "source a needs either a description or the path of one"),
    "two descriptions": ("[[source]]\nname = 'a'\npath = 'x'\ndescription = 'y'", "source a needs either"),
    "a description that is missing": ("[[source]]\nname = 'a'\npath = 'x'", "x: No such file or directory"),
    "twice": ("[[source]]\nname = 'a'\ndescription = ''\n" * 2, "source a stands there twice"),
    "configuration": ("configuration = 'x'", "x: No such file or directory"),
    "a list": ("source = 'a'", "source: "),
    "a secret": ("[more]\nkey = 1", "more[...]: "),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_cannot_be_used_says_why(wrong: str, tmp_path: Path) -> None:
    text, error = WRONG[wrong]
    path = file(tmp_path, text)
    with pytest.raises(InputError) as said:
        statement(path)
    assert str(said.value).startswith(f"{path}: ")
    assert error in str(said.value)


def test_a_file_that_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml: No such file or directory: name a manifest that exists"):
        statement(tmp_path / "none.toml")


def made(**changes: Any) -> ManifestHeader:
    known = {
        "schema": 1, "run": NONE, "learner": "eu", "code": "v1", "model": NONE, "configuration": NONE,
        "sources": (Source("web", b"a" * 32),), "hardware": "one CPU", "written_at": 1.0,
    }  # fmt: skip
    return ManifestHeader(**known | changes)  # type: ignore[arg-type]


def test_a_change_is_told_field_by_field() -> None:
    other = made(
        code="", configuration=b"c" * 32, sources=(Source("books", b"b" * 32),), more={"code": "x"}, written_at=2.0
    )
    assert manifests.changes(made(), made(written_at=2.0)) == []
    assert manifests.changes(made(), other) == [
        "code was v1, and is not stated",
        "configuration was not stated, and is 6363636363636363",
        "source books is new: 6262626262626262",
        "more.code is new: x",
        "source web is gone, and was 6161616161616161",
    ]
    assert manifests.changes(made(), made(sources=(Source("web", b"d" * 32),))) == [
        "source web was 6161616161616161, and is 6464646464646464"
    ]
    assert manifests.told(other) == [
        "code not stated; configuration 6363636363636363; hardware one CPU",
        "sources: books (6262626262626262)",
        "more.code: x",
    ]


def test_every_part_of_a_model_is_in_its_digest() -> None:
    spec = Spec("a", (4, 2), "float32", TensorClass.DENSE)
    others = (
        replace(spec, name="b"), replace(spec, shape=(2, 4)), replace(spec, dtype="bfloat16"),
        replace(spec, role=TensorClass.EMBEDDING),
    )  # fmt: skip
    assert len({manifests.model_digest(partition([one], 1)) for one in (spec, *others)}) == 5
    assert manifests.model_digest(partition([spec], 1)) == manifests.model_digest(partition([spec], 1))


def agreed(manifests: bool = True, *terms: Terms) -> Membership:
    owners = (Owner("north", b"k" * 32),)
    charter = Charter(owners=owners, amend=1, admit=1, expel=1, manifests=manifests, terms=terms)
    return Membership(1, b"k" * 32, charter=charter)


def refused(judge: Membership, named: bytes | None, manifest: ManifestHeader | None) -> Reason | None:
    try:
        manifests.require(judge, "eu", named, manifest)
    except RecordInvalid as error:
        return error.reason
    return None


def test_only_a_charter_that_asks_for_manifests_judges_them() -> None:
    only = Terms(member="eu", sources=("web",))
    books = made(sources=(Source("books", NONE), Source("web", NONE)))
    for judge in (Membership(1, NONE), agreed(False, only)):
        assert refused(judge, None, None) is None
        assert refused(judge, NONE, books) is None
    assert refused(agreed(), None, None) is Reason.NO_MANIFEST
    assert refused(agreed(), NONE, None) is Reason.UNREAD_MANIFEST
    assert refused(agreed(), NONE, books) is None, "no terms: any source"
    assert refused(agreed(True, Terms(member="eu")), NONE, books) is None, "terms without sources: any source"
    assert refused(agreed(True, only), NONE, books) is Reason.SOURCE_NOT_ALLOWED
    assert refused(agreed(True, only), NONE, made()) is None
    assert refused(agreed(True, only), NONE, made(sources=())) is None


def test_a_lost_manifest_is_a_reason_for_now_and_the_others_are_final() -> None:
    assert Reason.UNREAD_MANIFEST in PASSING <= LOSSLESS
    assert {Reason.NO_MANIFEST, Reason.SOURCE_NOT_ALLOWED} <= FINAL
