"""The `isthmus` command: one parser, one place where errors become exit codes.

0 done · 1 the check failed · 2 bad usage or input (one line on stderr that says what and where) · 3 a learner that has
done its steps, and nothing of them was ever merged · 130 interrupted · 143 a learner that was told to stop (SIGTERM)
before it had done its steps
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from isthmus.errors import Fenced, IsthmusError, LogCorrupt, first_cause
from isthmus_services import commands, logs, settings
from isthmus_services.report import stdout


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
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    families = {}
    for name, text in commands.FAMILIES.items():
        family = subparsers.add_parser(name, help=text, description=text)
        families[name] = family.add_subparsers(required=True, metavar="WHAT")
    for command in commands.ALL:
        *family_name, name = command.name.split()
        within = families[family_name[0]] if family_name else subparsers
        subparser = within.add_parser(name, help=command.help)
        settings.add_flags(subparser, command.settings, settings.environment())
        subparser.set_defaults(command=command)
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments.command, arguments)
    except KeyboardInterrupt:
        return 130
    except (BaseExceptionGroup, IsthmusError) as error:
        return _explain(first_cause(error), arguments.command.name)


def _run(command: commands.Command, arguments: argparse.Namespace) -> int:
    environment = settings.environment()
    resolved: settings.Resolved[object] = settings.resolve(
        command.settings, command.name, arguments, environment, commands.names()
    )
    if arguments.show_settings:
        settings.show(resolved, stdout(), environment)
        return 0
    for name in resolved.stray:
        print(f"warning: {settings.said_of(name, resolved)}", file=sys.stderr)
    # Imported only now: `isthmus --help` needs no torch.
    return int(importlib.import_module(f"isthmus_services.{command.module}").run(resolved.values) or 0)


def _explain(error: BaseException, command: str) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, IsthmusError):
        raise error
    logs.last_word(command, " ".join(str(error).split()))
    # A damaged log is a failed check, a learner taken over has nothing left to do; the rest an operator sets right.
    return 1 if isinstance(error, LogCorrupt | Fenced) else 2


if __name__ == "__main__":
    sys.exit(main())
