"""Flags that several commands share, and the checks that turn bad ones into one clear line."""

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from isthmus.bus import default_bus
from isthmus.codecs import CODECS
from isthmus.errors import InputError
from isthmus.rules import MERGES, OUTER_LR, Pace, Rules

BUILT_IN_MODEL = "isthmus.demo.gpt:byte_gpt"


def add_bus(parser: argparse.ArgumentParser) -> None:
    """Add --bus."""
    parser.add_argument("--bus", help="redis://host:port (default: the embedded bus beside a run in a folder)")


def bus_of(arguments: argparse.Namespace, run: str) -> str:
    """Return the bus to use. Raises `InputError` where it has to be given."""
    bus = arguments.bus or default_bus(run)
    if bus is None:
        raise InputError(f"{run} is in a bucket: say which bus it uses with --bus redis://host:port")
    return str(bus)


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a run's arithmetic, fixed at its creation."""
    group = parser.add_argument_group("arithmetic of the run (fixed once it is created)")
    group.add_argument("--fragments", type=int, default=12, metavar="P", help="fragments of the model (12)")
    group.add_argument("--sync-every", type=int, default=12, metavar="H", help="steps between uploads of one (12)")
    group.add_argument("--merge", choices=MERGES, default="rda", help="merge rule; embeddings are averaged (rda)")
    group.add_argument("--codec", choices=list(CODECS), default="int4", help="codec of learners' updates (int4)")
    group.add_argument("--codec-down", choices=list(CODECS), default="int8", help="codec of new versions (int8)")
    group.add_argument("--outer-lr", type=float, help="outer learning rate (0.4 for rda, 0.7 for avg)")
    group.add_argument("--outer-momentum", type=float, default=0.5, help="outer Nesterov momentum (0.5)")


def rules_of(a: argparse.Namespace) -> Rules:
    """Return the rules these flags ask for. Raises `InputError`."""
    return Rules(
        fragments=a.fragments,
        sync_every=a.sync_every,
        merge=a.merge,
        outer_lr=OUTER_LR[a.merge] if a.outer_lr is None else a.outer_lr,
        outer_momentum=a.outer_momentum,
        codec_up=a.codec,
        codec_down=a.codec_down,
    ).check()


_PACE = {
    "quorum": (int, "K", "learners a round waits for before grace starts"),
    "overlap": (float, "TAU", "steps a fragment may be under way"),
    "grace": (float, "GAMMA", "share of the slack spent waiting for more learners"),
    "staleness": (int, "N", "versions old a base may be"),
    "snapshot_every": (int, "S", "versions between full states"),
    "heartbeat_s": (float, "S", "seconds between signs of life"),
    "silence_s": (float, "S", "seconds after which a silent learner is not waited for"),
}


def add_pace(parser: argparse.ArgumentParser) -> None:
    """Add the flags of waiting; a process may differ from the run's default."""
    group = parser.add_argument_group("pace (may change on the way; default: the run's)")
    for name, (kind, metavar, text) in _PACE.items():
        flag = "--" + name.removesuffix("_s").replace("_", "-")
        group.add_argument(flag, type=kind, dest=name, metavar=metavar, help=f"{text} ({getattr(Pace(), name)})")


def pace_of(a: argparse.Namespace, default: Pace) -> Pace:
    """Return the default with what these flags change. Raises `InputError`."""
    given = {name: getattr(a, name) for name in _PACE if getattr(a, name, None) is not None}
    return msgspec.structs.replace(default, **given).check()


def callable_of(path: str, flag: str) -> Callable[..., Any]:
    """Import PACKAGE.MODULE:FUNCTION, the current folder included. Raises `InputError` that says what failed."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{flag} {path}: write it as PACKAGE.MODULE:FUNCTION")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise InputError(f"{flag} {path}: {error}") from None
    except AttributeError:
        raise InputError(f"{flag} {path}: module {module_name} has no {name}") from None
    if not callable(found):
        raise InputError(f"{flag} {path}: {name} is not callable")
    return found  # type: ignore[no-any-return]


def need(package: str, extra: str) -> None:
    """Raise `InputError` that says how to install it, unless a package can be imported."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"this needs {package}: pip install 'isthmus[{extra}]'")
