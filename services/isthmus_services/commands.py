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
    p.add_argument("--model", metavar="PACKAGE.MODULE:FUNCTION", help="returns a module (the built-in byte GPT)")
    p.add_argument("--seed", type=int, default=0, help="seed of the initial parameters (0)")
    p.add_argument("--from", dest="source", metavar="FILE", help="take the initial parameters from a safetensors file")
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
    p.add_argument(
        "--ledger", action="store_true", help="every learner's ledger by fragment, as of its newest checkpoint"
    )
    p.add_argument("--json", metavar="PATH", help="write it there as JSON too")
    options.add_bus(p)
    p.set_defaults(run_command=_lazy("status", "run"))


def _replay(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "replay", help="fold the log again and compare every digest; under other rules; as a timeline"
    )
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder; a copied folder will do")
    p.add_argument("--fragment", type=int, action="append", metavar="P", help="only this one (may be repeated)")
    p.add_argument("--from", type=int, default=1, dest="first", metavar="V", help="first version to compare (1)")
    p.add_argument("--to", type=int, dest="last", metavar="V", help="last version (the newest)")
    p.add_argument("--threads", type=int, default=2, metavar="N", help="threads, and fragments at once (2)")
    p.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help="what if: merge, merge.embeddings, outer.lr, outer.momentum, quorum, grace, overlap, staleness",
    )
    p.add_argument("--export", metavar="FILE", help="with --set: write the other model as safetensors")
    p.add_argument("--plot", metavar="FILE", help="with --set: draw how far the trajectory departs")
    p.add_argument("--trace", metavar="FILE", help="write a timeline that opens in Perfetto")
    p.add_argument("--json", metavar="PATH", help="write what is printed there as JSON too")
    p.set_defaults(run_command=_lazy("replay", "run"))


def _explain(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("explain", help="the story of one update or one commit")
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder")
    p.add_argument(
        "what",
        metavar="WHAT",
        help="a commit (FRAGMENT/VERSION or its key), an update (FRAGMENT/LEARNER/BASE or its key)",
    )
    p.add_argument("--json", metavar="PATH", help="write it there as JSON too")
    p.set_defaults(run_command=_lazy("explain", "run"))


def _export(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("export", help="write the global model as a safetensors file")
    p.add_argument("run", metavar="RUN", help="s3://bucket/prefix or a folder")
    p.add_argument("-o", "--out", required=True, metavar="FILE", help="where to, e.g. model.safetensors")
    when = p.add_mutually_exclusive_group()
    when.add_argument("--version", type=int, metavar="V", help="this version of every fragment (the newest of each)")
    when.add_argument("--at", metavar="TIME", help="as it was then: 2026-11-21T14:30:00, or seconds since 1970")
    p.add_argument("--json", metavar="PATH", help="write where and which versions there as JSON too")
    p.set_defaults(run_command=_lazy("export", "run"))


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


ALL = (_demo, _init, _syncer, _learner, _status, _replay, _explain, _export, _gc)
