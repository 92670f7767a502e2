"""The `isthmus` command: one parser, one place where errors become exit codes.

0 done · 1 a check failed, or the learner was fenced · 2 bad usage or input (one line on stderr says what and where) ·
3 a learner completed its steps, but none of its work was merged · 130 interrupted · 141 the reader of the output ended
(`isthmus … | head`) · 143 told to stop (SIGTERM), a learner before it had completed its steps
"""

import argparse
import importlib
import os
import re
import select
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from isthmus.errors import Fenced, IsthmusError, LogCorrupt, first_cause, legible
from isthmus.version import __version__
from isthmus_services.output.copies import which_runs
from isthmus_services.settings.command import Command, installed, names

COMMAND = "command_name"

BLAS_THREADS = "OPENBLAS_NUM_THREADS"

WITHOUT_BLAS = frozenset({"board", "doctor", "status", "syncer"})
"""Commands that multiply no matrices with NumPy and run no code of users. NumPy would start a thread for each further
core, with buffers, and import in 110 ms instead of 70 on two cores."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports what is wrong in one line; `--help` has the rest."""

    def __init__(self, **about: Any) -> None:
        # With abbreviations, `--bus-password X` would mean `--bus-password-file X`, and the error would show X.
        super().__init__(**{"allow_abbrev": False} | about)

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit with code 2."""
        if "--json: expected one argument" in message:
            message += ", a path, or - for stdout"
        self.exit(2, f"{self.prog}: {_said(message)} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """See argparse. Its own message lists every command; for an unknown one, suggest the nearest instead."""
        if action.dest == COMMAND and action.choices is not None and value not in action.choices:
            near = _nearest(value, action.choices) or _nearest(value, [c.name for c in installed()[0]])
            self.error(f"there is no command {value}" + (f": did you mean {near}?" if near else ""))
        super()._check_value(action, value)


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a word, or an empty text. One word of a two-word name is enough."""
    names = {part: name for name in known for part in (name, *name.split())}
    import difflib

    near = difflib.get_close_matches(word, names, 1, cutoff=0.65)
    return names[near[0]] if near else ""


class _Version(argparse.Action):
    """The action of `--version`: print the versions and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(version())
        parser.exit(0)


def version() -> str:
    """Return the versions of Isthmus, Python and torch: what a helper asks for first."""
    import platform
    from importlib import metadata

    said = f"isthmus {__version__}, Python {platform.python_version()}"
    try:
        return f"{said}, torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return f"{said}, no torch"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    if os.getpid() == 1:
        # The kernel does not end a container's first process by a signal that it does not handle: the deletion of a pod
        # would wait for its whole grace period. Commands that have something to finish replace this handler.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        try:
            return _main(argv)
        finally:
            if sys.stdout is not None:  # it is None if the command was started without one
                sys.stdout.flush()  # at exit, an error could not be caught any more
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            raise
        # What is still buffered goes nowhere, or Python would try to write it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _has_lost_its_reader(descriptor: int) -> bool:
    """Return whether a file descriptor is a pipe or a socket that nothing reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _main(argv: Sequence[str] | None) -> int:
    arguments = parsed(argv)
    try:
        return _run(arguments.command, arguments)
    except KeyboardInterrupt:
        return 130
    except (BaseExceptionGroup, IsthmusError) as error:
        return _explain(first_cause(error), arguments.command.name)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line, with its command and parser. Ends the process with code 2 if it is wrong."""
    words = sys.argv[1:] if argv is None else argv
    arguments, unknown = parser(words).parse_known_args(words)
    if unknown:
        _refuse(arguments.parser, unknown)
    return arguments


def parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands; with the flags of those that these words of a command line may name."""
    parser = _Parser(
        prog="isthmus", description="Train one model on many islands of compute (Decoupled DiLoCo over object storage)."
    )
    # Suppress `dest`: commands have a setting named version, too.
    said = "print the versions of Isthmus, Python and torch, then exit"
    parser.add_argument("--version", action=_Version, nargs=0, dest=argparse.SUPPRESS, help=said)
    subparsers = parser.add_subparsers(dest=COMMAND, required=True, metavar="COMMAND")
    families = {}
    commands, texts = installed()
    for name, text in texts.items():
        family = subparsers.add_parser(name, help=text, description=text)
        families[name] = family.add_subparsers(dest=COMMAND, required=True, metavar="WHAT")
    for command in commands:
        *family_name, name = command.name.split()
        within = families[family_name[0]] if family_name else subparsers
        said = f"{command.help[:1].upper()}{command.help[1:]}."
        subparser = within.add_parser(name, help=command.help, description=said)
        if words is None or name in words:
            from isthmus_services.settings import resolve

            resolve.add_flags(subparser, command.settings, resolve.environment())
        subparser.set_defaults(command=command, parser=subparser)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Exit with an error that names the unknown flag or words, and the flag that was probably meant."""
    from isthmus_services.settings import resolve

    flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
    if flag is None:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    known, word = parser._option_string_actions, flag.lstrip("-")
    # A word of what a flag takes tells more than its letters: --port is not --export, but the PORT of --http HOST:PORT.
    takes = {name: a.metavar for name, a in known.items() if word.upper() in re.split(r"\W+", str(a.metavar))}
    if len(takes) == 1:
        ((near, what),) = takes.items()
        parser.error(f"there is no flag {flag}: did you mean {near} {what}?")
    parser.error(f"there is no flag {flag}{resolve.did_you_mean(word, (name.lstrip('-') for name in known), '--{}')}")


def _run(command: Command, arguments: argparse.Namespace) -> int:
    from isthmus_services.settings import resolve

    environment = resolve.environment()
    resolved: resolve.Resolved[object] = resolve.resolve(command.settings, command.name, arguments, environment, names)
    if arguments.show_settings:
        from isthmus_services.output.report import stdout
        from isthmus_services.settings.effective import effective

        resolve.show(resolved, stdout(), environment, effective(resolved.values))
        return 0
    for said in resolved.stray:
        print(f"warning: {said}", file=sys.stderr)
    if said := which_runs(Path.cwd()):
        print(f"note: {said}", file=sys.stderr)
    run = loaded(command).run
    if getattr(resolved.values, "json", None) != "-":
        return int(run(resolved.values) or 0)
    from isthmus_services.output.report import text_on_stderr

    with text_on_stderr():
        return int(run(resolved.values) or 0)


def loaded(command: Command) -> Any:
    """Import the module of a command, only now: `isthmus --help` needs no torch."""
    from isthmus.runtime.clock import uncollected

    alone = command.name in WITHOUT_BLAS and BLAS_THREADS not in os.environ
    if alone:
        os.environ[BLAS_THREADS] = "1"  # read while NumPy is imported
    try:
        with uncollected():
            return importlib.import_module(command.module)
    finally:
        if alone:
            del os.environ[BLAS_THREADS]  # processes that this one starts are others


def _said(words: str) -> str:
    """Return text in one line that is safe to show: without passwords, and with unprintable characters escaped."""
    from isthmus.runtime.urls import without_passwords

    return legible(without_passwords(" ".join(words.split())))


def _explain(error: BaseException, command: str) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, IsthmusError):
        raise error
    from isthmus_services.process import logs

    logs.last_word(command, _said(str(error)))
    # A damaged log is a failed check, and a fenced learner has nothing left to do. The operator can fix anything else.
    return 1 if isinstance(error, LogCorrupt | Fenced) else 2


if __name__ == "__main__":
    sys.exit(main())
