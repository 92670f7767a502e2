"""Fragments: whole tensors, balanced, the same everywhere; differences are named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import InputError
from isthmus.layout import Spec, TensorClass, first_difference, partition


def specs(*sizes: int) -> list[Spec]:
    return [Spec(f"t{i}", (n,), "float32", TensorClass.DENSE) for i, n in enumerate(sizes)]


def test_the_largest_tensors_go_to_the_lightest_fragments() -> None:
    assert partition(specs(5, 4, 3, 3, 3), 2).placement == (0, 1, 1, 0, 1)


def test_there_are_never_more_fragments_than_tensors() -> None:
    assert len(partition(specs(5, 4), 12).fragments) == 2


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 30))
def test_every_tensor_is_whole_in_one_fragment_and_none_is_too_heavy(sizes: list[int], count: int) -> None:
    layout = partition(specs(*sizes), count)
    assert sorted(t.spec.name for f in layout.fragments for t in f.tensors) == sorted(s.name for s in layout.specs)
    loads = [f.size for f in layout.fragments]
    assert all(f.tensors[0].start == 0 and f.size == sum(t.size for t in f.tensors) for f in layout.fragments)
    # Graham's bound for longest-processing-time-first, against what no packing can beat.
    k = len(loads)
    ordered = sorted(sizes, reverse=True)
    best = max(sum(sizes) / k, ordered[0], (ordered[k - 1] + ordered[k]) if len(sizes) > k else 0)
    assert max(loads) <= (4 / 3 - 1 / (3 * k)) * best + max(ordered[k:], default=0)


def test_the_layout_does_not_depend_on_anything_but_the_list() -> None:
    assert partition(specs(7, 7, 7, 2, 9), 3) == partition(specs(7, 7, 7, 2, 9), 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no trainable parameter"),
        ([Spec("a", (2,), "float32", TensorClass.DENSE)] * 2, "two tensors are named 'a'"),
        ([Spec("a", (0, 3), "float32", TensorClass.DENSE)], "no elements"),
        ([Spec("a", (3,), "int64", TensorClass.DENSE)], "is int64: only float32, bfloat16, float16"),
    ],
)
def test_a_model_that_cannot_be_merged_is_refused(bad: list[Spec], message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(bad, 4)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (specs(3, 4), "tensor 't2' of the run is missing"),
        ([*specs(3, 4, 5), Spec("x", (1,), "float32", TensorClass.DENSE)], "tensor 'x' is not in the run"),
        (
            [*specs(3), Spec("t1", (9,), "float32", TensorClass.DENSE), *specs(3, 4, 5)[2:]],
            r"'t1' has shape \(9,\), the run has \(4,\)",
        ),
        (
            [*specs(3, 4), Spec("t2", (5,), "bfloat16", TensorClass.DENSE)],
            "'t2' has dtype bfloat16, the run has float32",
        ),
        (
            [Spec("other", (3,), "float32", TensorClass.DENSE), *specs(3, 4, 5)[1:]],
            "tensor 'other' stands where the run has 't0'",
        ),
    ],
)
def test_the_first_difference_is_named(ours: list[Spec], message: str) -> None:
    import re

    assert re.search(message, first_difference(ours, specs(3, 4, 5)) or "")


def test_equal_models_have_no_difference() -> None:
    assert first_difference(specs(3, 4), specs(3, 4)) is None
