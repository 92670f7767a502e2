"""A processor runs the kernels of the highest level of which it has all features."""

import os
import subprocess
import sys

import pytest

from isthmus.codecs.kernels import levels

V2 = {"cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"}
V3 = V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"}
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (set(), "x86-64"),
        (V2 - {"popcnt"}, "x86-64"),
        (V2, "x86-64-v2"),
        (V3 - {"fma"}, "x86-64-v2"),  # some virtual machines hide this feature of their processor
        (V3 | {"avx512f"}, "x86-64-v3"),
        (V4, "x86-64-v4"),
        (V4 - {"sse3"}, "x86-64"),  # a level needs all lower ones
    ],
)
def test_the_highest_level_of_which_it_has_all(features: set[str], level: str) -> None:
    assert levels.level("x86_64", features | {"mmx", "amx-tile"}) == level
    assert levels.level("AMD64", features) == level


def test_another_architecture_has_one_level() -> None:
    assert levels.level("aarch64", {"neon"}) == "generic"
    assert levels.levels("arm64") == ("generic",)


def chosen(**environment: str) -> list[str]:
    told = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "ISTHMUS_"))} | environment
    program = (
        "import os; from isthmus.codecs.kernels import levels, matrices; levels.choose(); "
        "print(os.environ.get('NUMBA_CPU_NAME'), repr(os.environ.get('NUMBA_CPU_FEATURES')), matrices.has_fma())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=told)
    return done.stdout.split()


def test_a_process_chooses_where_it_is_asked_to_and_nobody_has_chosen() -> None:
    name, features, fused = chosen(ISTHMUS_KERNELS="levels")
    assert name in (*levels.LEVELS, levels.GENERIC)
    assert features == "''"
    assert fused == str(name not in ("x86-64", "x86-64-v2"))
    assert chosen()[:2] == ["None", "None"]
    assert chosen(ISTHMUS_KERNELS="levels", NUMBA_CPU_NAME="x86-64")[0] == "x86-64"


@pytest.mark.parametrize("level", ["x86-64", "x86-64-v2", "x86-64-v3"])
def test_llvm_knows_which_levels_multiply_and_add_at_once(level: str) -> None:
    assert chosen(NUMBA_CPU_NAME=level, NUMBA_CPU_FEATURES="")[2] == str(level == "x86-64-v3")


def test_the_levels_are_printed_for_the_image() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isthmus.codecs.kernels.levels"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] in ("x86-64", "generic")
