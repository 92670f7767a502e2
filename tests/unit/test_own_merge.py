"""A merge rule of one's own gets a round as the syncer merges it, and says plainly what is wrong with it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from isthmus.codecs import codec, pack
from isthmus.codecs.kernels import F32
from isthmus.codecs.packed import packed
from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus.inspect.own_merge import OwnMerge
from isthmus.log import merge
from isthmus_services.main import main

FRAGMENT = partition(
    [Spec("e", (8, 3), "float32", TensorClass.EMBEDDING), Spec("w", (12, 9), "float32", TensorClass.DENSE)], 1
).fragments[0]
DRAW = np.random.default_rng(0)
UPDATES = [DRAW.normal(size=FRAGMENT.size).astype(np.float32) for _ in range(3)]
WEIGHTS, SCALES = (3.0, 1.0, 4.0), (1.0, 0.5, 1.0)


def mean(updates: F32, weights: F32, tensors: Any) -> F32:
    return weights @ updates


def rda(updates: F32, weights: F32, tensors: Any) -> F32:
    delta = np.zeros(updates.shape[1], np.float32)
    for t in tensors:
        part = updates[:, t.start : t.stop]
        lengths = np.linalg.norm(part, axis=1)
        way = weights @ (part / lengths[:, None])
        delta[t.start : t.stop] = (weights @ lengths) * way / np.linalg.norm(way)
    return delta


@pytest.mark.parametrize(("own", "name"), [(mean, "avg"), (rda, "rda")])
def test_a_rule_written_by_hand_gives_what_the_built_in_rule_gives(own: Callable[..., F32], name: str) -> None:
    rules = Rules(merge=name, merge_embeddings=name)
    state = merge.initial(DRAW.normal(size=FRAGMENT.size).astype(np.float32))
    found = []
    for round_ in (
        merge.Accumulator(FRAGMENT, merge.outers(rules)),
        OwnMerge("own", own).accumulator(FRAGMENT, merge.outers(rules)),
    ):
        for x, weight, scale in zip(UPDATES, WEIGHTS, SCALES, strict=True):
            code = codec("f32")
            sent = packed(FRAGMENT, code, pack(code, FRAGMENT, x))
            round_.add(sent, weight, scale if name == "avg" else 1.0, learner="l")
        found.append(merge.advance(state, round_, codec("f32"), bytes(32)).state)
    built_in, mine = found
    assert not np.array_equal(built_in.published, state.published)
    assert np.allclose(mine.published, built_in.published, rtol=1e-5, atol=1e-6)
    assert np.allclose(mine.momentum, built_in.momentum, rtol=1e-5, atol=1e-6)


def test_the_tensors_say_where_they_lie_and_what_they_are() -> None:
    def own(updates: F32, weights: F32, tensors: Any) -> F32:
        assert np.isclose(weights.sum(), 1.0)
        assert weights.dtype == updates.dtype == np.float32
        assert [(t.name, t.shape, t.is_matrix, t.spec.role) for t in tensors] == [
            ("e", (8, 3), True, "embedding"),
            ("w", (12, 9), True, "dense"),
        ]
        assert tensors[-1].stop == updates.shape[1]
        updates[:] = 0.0
        return np.zeros_like(updates[0])

    sent = UPDATES[0].copy()
    round_ = OwnMerge("own", own).accumulator(FRAGMENT, merge.outers(Rules()))
    round_.add(sent, 2.0)
    ((delta, scale), _), cancelled = round_.deltas()
    assert (scale, cancelled, bool(delta.any())) == (1.0, 0, False)
    assert np.array_equal(sent, UPDATES[0]), "the function gets a copy"


def raising(updates: F32, weights: F32, tensors: Any) -> F32:
    raise ValueError("no\nway")


def drawing(updates: F32, weights: F32, tensors: Any) -> F32:
    drawn: F32 = weights @ updates + np.float32(random.random())
    return drawn


NUMBERS = np.random.default_rng(0)
"""A generator that is seeded once: a process that merges other rounds before draws other numbers."""

CALLS: list[int] = []


def counting(updates: F32, weights: F32, tensors: Any) -> F32:
    CALLS.append(1)
    smaller: F32 = updates.mean(axis=0) / np.float32(len(CALLS))
    return smaller


def test_the_first_round_of_each_fragment_is_merged_twice_and_later_ones_once() -> None:
    calls: list[int] = []

    def seeded(updates: F32, weights: F32, tensors: Any) -> F32:
        calls.append(len(updates))
        noise = np.random.default_rng(0).standard_normal(updates.shape[1], np.float32)
        updates += noise
        return weights @ updates

    OwnMerge("own", seeded).require_sound()
    assert calls == [3, 3, 1, 1]
    sent, weights = np.stack(UPDATES), np.full(3, 1 / 3, np.float32)
    expected = weights @ (sent + np.random.default_rng(0).standard_normal(FRAGMENT.size, np.float32))
    first = OwnMerge("own", seeded)
    for _ in range(2):
        assert np.array_equal(first.merged(sent.copy(), weights, FRAGMENT), expected)
    first.merged(sent[:2].copy(), np.full(2, 0.5, np.float32), FRAGMENT)
    assert calls[4:] == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda updates, weights: updates[0], "; define it as def merge(updates, weights, tensors)"),
        (raising, f"raised ValueError at {__file__}:"),
        (raising, r": no\nway"),
        (lambda u, w, t: None, "returned NoneType: return a numpy array [3632] of float32"),
        (lambda u, w, t: u[:, :5].mean(axis=0), "returned an array of shape [5]: return [3632]"),
        (lambda u, w, t: w[None] @ u, "of shape [1, 3632]: return [3632]; .reshape(-1) makes it flat"),
        (lambda u, w, t: w.astype(float) @ u, "returned float64: return float32, by .astype(np.float32)"),
        (lambda u, w, t: u[0] * np.float32("inf"), "returned NaN or infinity in tensor embedding: do not divide"),
        (drawing, "twice returned different bits for the same updates, first in tensor embedding (2048 of 2048"),
        (
            lambda u, w, t: u[0] * np.float32(NUMBERS.random()),
            "makes in each call, such as numpy.random.default_rng(0)",
        ),
        (counting, ", and keep nothing from one call to the next"),
        (lambda u, w, t: u[1], "merging 1 updates [1, 3632] raised IndexError"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_merged(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        OwnMerge("--merge mine:rule", function).require_sound()
    assert str(error.value).startswith("--merge mine:rule: merging ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("own_rule_absent:median", "there is no module own_rule_absent in "),
        ("own_rule_bad:median", "own_rule_bad imports own_rule_absent, which is not installed"),
        ("own_rule_worse:median", "importing own_rule_worse raised ZeroDivisionError: division by zero"),
        (
            "own_rule_script:median",
            "importing own_rule_script ended the program, as a script does that parses arguments",
        ),
        ("own_rule_good:medain", "module own_rule_good has no medain: did you mean median?"),
        ("own_rule_good:NUMBER", "NUMBER is not callable"),
        ("own_rule_good", "write it as PACKAGE.MODULE:FUNCTION"),
    ],
)
def test_a_function_that_cannot_be_found_is_named(
    path: str, said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rule_bad.py").write_text("import own_rule_absent\n")
    (tmp_path / "own_rule_worse.py").write_text("1 / 0\n")
    script = "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n"
    (tmp_path / "own_rule_script.py").write_text(script)
    (tmp_path / "own_rule_good.py").write_text("NUMBER = 1\n\n\ndef median(u, w, t):\n    return u[0]\n")
    for words in (["simulate", "training", "merge"], ["replay", "RUN"]):
        assert main([*words, "--merge", path]) == 2
        assert f"--merge {path}: {said}" in capsys.readouterr().err


def test_no_run_is_created_that_merges_by_a_function(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "RUN"), "--merge", "mine:rule"]) == 2
    said = capsys.readouterr().err
    assert "all syncers must compute the same bits; `isthmus simulate training merge --merge mine:rule`" in said
    assert not (tmp_path / "RUN").exists()
