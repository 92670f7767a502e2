"""Builds the site: `PYTHONPATH=docs python -m website` (or `make site`)."""

import argparse
import sys
from pathlib import Path

from website.build import SiteInvalid, build


def main() -> int:
    """Build it; return 1 where something in it is dead or wrong."""
    parser = argparse.ArgumentParser(prog="website", description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("out/site"), help="replaced (out/site)")
    arguments = parser.parse_args()
    try:
        build(arguments.into)
    except SiteInvalid as error:
        print(f"website: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.into}/index.html")
    return 0


sys.exit(main())
