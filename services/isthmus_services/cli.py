"""The `isthmus` command: one parser, one place where errors become exit codes.

0 done · 1 the check failed · 2 bad usage or input (one line on stderr that says what and where) · 130 interrupted
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from isthmus.errors import Fenced, IsthmusError, LogCorrupt, first_cause
from isthmus_services import commands


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; `--help` has the rest."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    parser = _Parser(
        prog="isthmus", description="Train one model on many islands of compute (Decoupled DiLoCo over object storage)."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in commands.ALL:
        add(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run_command(arguments) or 0)
    except KeyboardInterrupt:
        return 130
    except (BaseExceptionGroup, IsthmusError) as error:
        return _explain(first_cause(error), arguments.command)


def _explain(error: BaseException, command: str) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, IsthmusError):
        raise error
    print(f"isthmus {command}: {' '.join(str(error).split())}", file=sys.stderr)
    # A damaged log is a failed check, a learner taken over has nothing left to do; the rest an operator sets right.
    return 1 if isinstance(error, LogCorrupt | Fenced) else 2


if __name__ == "__main__":
    sys.exit(main())
