"""Fragments are balanced and the same everywhere, only large tensors are cut, and differences of models are named."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import InputError
from isthmus.format.layout import CUT_FROM, Spec, TensorClass, first_difference, partition, place


def specs(*sizes: int) -> list[Spec]:
    return [Spec(f"t{i}", (n,), "float32", TensorClass.DENSE) for i, n in enumerate(sizes)]


def test_the_largest_tensors_go_to_the_lightest_fragments() -> None:
    placement = partition(specs(5, 4, 3, 3, 3), 2).placement
    assert [cut for (cut,) in placement] == [(0, 5), (1, 4), (1, 3), (0, 3), (1, 3)]


def test_there_are_never_more_fragments_than_tensors() -> None:
    assert len(partition(specs(5, 4), 12).fragments) == 2


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.integers(1, 30))
def test_every_tensor_is_whole_in_one_fragment_and_none_is_too_heavy(sizes: list[int], count: int) -> None:
    layout = partition(specs(*sizes), count)
    assert sorted(t.spec.name for f in layout.fragments for t in f.tensors) == sorted(s.name for s in layout.specs)
    loads = [f.size for f in layout.fragments]
    assert all(f.tensors[0].start == 0 and f.size == sum(t.size for t in f.tensors) for f in layout.fragments)
    # Graham's bound for longest-processing-time-first, relative to a load that no packing can beat.
    k = len(loads)
    ordered = sorted(sizes, reverse=True)
    best = max(sum(sizes) / k, ordered[0], (ordered[k - 1] + ordered[k]) if len(sizes) > k else 0)
    assert max(loads) <= (4 / 3 - 1 / (3 * k)) * best + max(ordered[k:], default=0)


def transformer(
    width: int, layers: int, inner: int, words: int, *, kv: int | None = None, gated: bool = True, tied: bool = False
) -> list[tuple[int, ...]]:
    """Return the shapes of a decoder's parameters; `kv`: width of keys and values."""
    kv = kv or width
    block: list[tuple[int, ...]] = [(width, width), (kv, width), (kv, width), (width, width), (width,), (width,)]
    block += [(inner, width)] * (2 if gated else 1)
    block += [(width, inner)]
    tables: list[tuple[int, ...]] = [(words, width)] * (1 if tied else 2)
    norm: list[tuple[int, ...]] = [(width,)]
    return tables + block * layers + norm


def experts(width: int, layers: int, experts: int, inner: int) -> list[tuple[int, ...]]:
    one: list[tuple[int, ...]] = [(inner, width), (inner, width), (width, inner)]
    return one * experts * layers


MODELS = {
    "GPT-2": [*transformer(768, 12, 3072, 50257, gated=False, tied=True), (1024, 768)],
    "Llama-3-8B": transformer(4096, 32, 14336, 128256, kv=1024),
    "Llama-3-70B": transformer(8192, 80, 28672, 128256, kv=1024),
    "Qwen2-7B": transformer(3584, 28, 18944, 152064, kv=512),
    "Gemma-2-9B": transformer(3584, 42, 14336, 256000, kv=2048, tied=True),
    "DeepSeek-V3, experts": experts(7168, 58, 256, 2048),
}


@pytest.mark.parametrize("fragments", [8, 24, 96, 512])
@pytest.mark.parametrize("model", MODELS)
def test_fragments_of_real_models_are_balanced(model: str, fragments: int) -> None:
    found = partition(
        [Spec(f"t{i}", shape, "bfloat16", TensorClass.DENSE) for i, shape in enumerate(MODELS[model])], fragments
    )
    loads = [f.size for f in found.fragments]
    mean = sum(loads) / len(loads)
    assert len(loads) == fragments
    assert max(loads) <= 1.1 * mean
    assert min(loads) >= 0.9 * mean


def test_only_what_is_larger_than_a_fragment_is_cut_where_balance_is_not_all() -> None:
    layer = [(768, 256), (256, 256), (1024, 256), (256, 1024)]
    shapes = [(256, 256), *layer * 8]
    narrow = [Spec(f"t{i}", shape, "float32", TensorClass.DENSE) for i, shape in enumerate(shapes)]
    assert any(len(cuts) > 1 for cuts in partition(narrow, 12).placement)
    whole = partition(narrow, 12, finer=False)
    assert all(len(cuts) == 1 for cuts in whole.placement)
    assert max(f.size for f in whole.fragments) <= 4 / 3 * whole.size / 12
    assert any(len(cuts) > 1 for cuts in partition(narrow, 96, finer=False).placement)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 600)), min_size=1, max_size=12), st.integers(1, 64))
def test_pieces_are_the_rows_of_large_tensors_each_once(shapes: list[tuple[int, int]], count: int) -> None:
    layout = partition([Spec(f"t{i}", shape, "float32", TensorClass.DENSE) for i, shape in enumerate(shapes)], count)
    rows: dict[str, list[tuple[int, int]]] = {}
    for f in layout.fragments:
        at = 0
        for t in f.tensors:
            assert (t.start, t.stop) == (at, at + t.size)
            assert t.size == t.shape[0] * t.shape[1]
            assert t.rows is None or t.spec.size > CUT_FROM
            assert t.origin == (t.rows[0] if t.rows else 0) * t.spec.shape[1]
            rows.setdefault(t.spec.name, []).append(t.rows or (0, t.spec.shape[0]))
            at = t.stop
        assert at == f.size
    for spec in layout.specs:
        edges = sorted(rows[spec.name])
        assert edges[0][0] == 0
        assert edges[-1][1] == spec.shape[0]
        assert all(a[1] == b[0] for a, b in pairwise(edges))
    assert place(layout.specs, layout.placement) == layout


@pytest.mark.parametrize("cuts", [[(0, 3)], [(0, 3), (1, 2)], [(0, 2), (2, 2)]])
def test_a_placement_of_other_rows_or_with_an_empty_fragment_is_refused(cuts: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"has 4 rows|is empty"):
        place(specs(4), [cuts])


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
