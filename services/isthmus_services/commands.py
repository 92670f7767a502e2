"""The commands and their flags; what each one does lives in a module of its own, imported when it is used."""

import argparse
from collections.abc import Callable
from typing import Any

from isthmus.rules import ADOPTIONS
from isthmus_services import options

Subparsers = Any  # argparse keeps its type private


def _demo(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("demo", help="train a small model with four learner processes, watch and report")
    p.add_argument("--steps", type=int, default=1500, help="optimizer steps per learner (1500)")
    p.add_argument("--learners", type=int, default=4, metavar="M", help="learner processes (4)")
    p.add_argument("--seed", type=int, default=0, help="seed of initialisation, data order and kills (0)")
    p.add_argument("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    p.add_argument("--adopt", choices=ADOPTIONS, default="overwrite", help="what a new version does to local work")
    p.add_argument("--kill-every", type=float, metavar="S", help="SIGKILL a random learner every S seconds")
    p.add_argument("--kill-syncer-every", type=float, metavar="S", help="SIGKILL the syncer every S seconds")
    p.add_argument("--out", default="out/demo", metavar="DIR", help="where everything is written (out/demo)")
    p.add_argument("--store", metavar="URL", help="where the run lives (default: DIR/run)")
    p.add_argument("--servers", action="store_true", help="start an S3 server and a Redis on loopback and use them")
    p.add_argument("--json", metavar="PATH", help="write the report there too")
    options.add_bus(p)
    options.add_rules(p)
    options.add_pace(p)
    p.set_defaults(run_command=_lazy("demo", "run"))


def _init(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("init", help="create a run: its object and version 0")
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder")
    p.add_argument(
        "--model", default=options.BUILT_IN_MODEL, metavar="PACKAGE.MODULE:FUNCTION", help="returns a module"
    )
    p.add_argument("--seed", type=int, default=0, help="seed of the initial parameters (0)")
    p.add_argument("--create-bucket", action="store_true", help="create the bucket where it is missing")
    options.add_rules(p)
    options.add_pace(p)
    p.set_defaults(run_command=_lazy("init", "run"))


def _syncer(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("syncer", help="merge what learners announce; any number may run")
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder")
    p.add_argument("--name", help="name of this syncer (default: made up)")
    options.add_bus(p)
    options.add_pace(p)
    p.set_defaults(run_command=_lazy("syncer", "run"))


def _learner(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("learner", help="train with the built-in trainer or your own")
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder")
    p.add_argument("--learner", required=True, metavar="NAME", help="unique in the run; goes on where it stopped")
    p.add_argument(
        "--train",
        default="isthmus.demo.trainer:train",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="called with an isthmus.demo.trainer.Task",
    )
    p.add_argument("--steps", type=int, default=1500, help="optimizer steps, over all restarts (1500)")
    p.add_argument("--data", metavar="PATH", help="text file or folder (default: Python's standard library)")
    p.add_argument("--shard", default="0/1", metavar="I/M", help="this learner's part of the data (0/1: all)")
    p.add_argument("--seed", type=int, help="seed of the data order (default: the run's)")
    p.add_argument("--adopt", choices=ADOPTIONS, default="overwrite", help="what a new version does to local work")
    p.add_argument("--checkpoint", type=float, default=60.0, metavar="S", help="seconds between checkpoints (60)")
    options.add_bus(p)
    p.set_defaults(run_command=_lazy("learner", "run"))


def _status(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("status", help="versions, learners, who is behind and why, rejections, ledger")
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder")
    p.add_argument("--json", metavar="PATH", help="write it there as JSON too")
    options.add_bus(p)
    p.set_defaults(run_command=_lazy("status", "run"))


def _gc(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("gc", help="delete what the log has passed by, pack old commits; a dry run by default")
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder")
    p.add_argument(
        "--keep", type=int, default=64, metavar="N", help="versions of each fragment that stay foldable (64)"
    )
    p.add_argument(
        "--min-age",
        type=float,
        default=3600.0,
        metavar="S",
        help="leave what was written less than S seconds ago (3600)",
    )
    p.add_argument("--apply", action="store_true", help="do it")
    p.add_argument("--json", metavar="PATH", help="write the figures there too")
    p.set_defaults(run_command=_lazy("gc", "run"))


def _lazy(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """Import a command's module only when it is called: `isthmus --help` needs no torch."""

    def call(arguments: argparse.Namespace) -> int:
        import importlib

        return int(getattr(importlib.import_module(f"isthmus_services.{module}"), function)(arguments) or 0)

    return call


ALL = (_demo, _init, _syncer, _learner, _status, _gc)
