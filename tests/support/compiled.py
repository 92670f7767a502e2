"""Compile kernels and test modules once, into the caches on disk, before several workers would each compile all of them."""

import contextlib
import io
import sys

import pytest

from isthmus.codecs import kernels


def main() -> int:
    """Load the kernels, and import the tests without running them. Return 1, and say why, if one cannot be imported."""
    kernels.warm()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        failed = pytest.main(["--collect-only", "-qqq", "--tier", "test"]) != 0
    if failed:
        print(said.getvalue())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
