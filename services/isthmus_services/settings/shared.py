"""Settings that several commands share, and the checks that report a bad one in one clear line."""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from isthmus.errors import InputError
from isthmus.format.isotropic import SOUND_FLOP_S
from isthmus.format.layout import Spec
from isthmus.format.rules import LONG_STEPS, SENT_ISOTROPIC, CodecName, MergeRule, Pace, Rules, outer_for, require_codec
from isthmus.runtime.urls import as_user, trusting
from isthmus.wording import an
from isthmus_services.settings.resolve import Setting, did_you_mean, fields, settings_class

if TYPE_CHECKING:
    from isthmus.inspect.own_merge import OwnMerge
    from isthmus.log.trust import Trust

BUILT_IN_MODEL = "isthmus.demo.gpt:byte_gpt"

CALLABLE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""PACKAGE.MODULE:FUNCTION, without any character that is special to a terminal or a shell."""

_OURS = re.compile(r"(isthmus\.demo(?:\.[a-z]\w*)*):([a-z]\w*)", re.ASCII)


@settings_class
class InRun:
    """The run."""

    run: Annotated[str, Setting("location of the run: s3://bucket/prefix or a folder", positional=True)]
    owner: Annotated[
        str | None,
        Setting("required owner of the run: a fingerprint or a .pub file (default: any)", metavar="KEY"),
    ] = None
    run_digest: Annotated[
        str | None,
        Setting("required digest of the run, or at least its first 32 digits (default: any)", metavar="HEX"),
    ] = None


@settings_class
class AcceptingHoles:
    """Holes in the log that nobody can mend."""

    accept_hole: Annotated[
        list[str] | None,
        Setting(
            "fragments and versions that are lost for good, and that the run does not need: isthmus heal names them",
            metavar="P/V",
        ),
    ] = None


HOLES_MOST = 1_000_000
"""The most versions that one word accepts as lost."""


def holes_in(settings: AcceptingHoles) -> dict[int, frozenset[int]]:
    """Return the accepted versions by fragment. Raises `InputError` for a word that names none."""
    found = dict[int, frozenset[int]]()
    for word in settings.accept_hole or ():
        if not (named := re.fullmatch(r"([0-9]{1,5})/([0-9]{1,12})(?:-([0-9]{1,12}))?", word)):
            raise InputError(f"--accept-hole {word!r}: write FRAGMENT/VERSION, as in 1/10, or FRAGMENT/FIRST-LAST")
        p, first, last = int(named[1]), int(named[2]), int(named[3] or named[2])
        if not first <= last < first + HOLES_MOST:
            raise InputError(f"--accept-hole {word!r}: write FIRST-LAST, at most {HOLES_MOST:,} versions")
        found[p] = found.get(p, frozenset()) | set(range(first, last + 1))
    return found


@settings_class
class Signed:
    """Signing."""

    key: Annotated[
        str | None,
        Setting(
            "OpenSSH Ed25519 private key that signs everything this process writes (default: do not sign)",
            metavar="FILE",
        ),
    ] = None


@settings_class
class TakingPart(Signed):
    """Unsigned runs."""

    insecure: Annotated[bool, Setting("allow an unsigned run whose store or bus is on another machine")] = False


def _require_bus(url: str) -> None:
    """Raise `InputError` unless a bus can have this URL."""
    from isthmus.bus import require_bus  # imports asyncio, which `isthmus --help` does not need

    require_bus(url)


@settings_class
class OnBus:
    """The bus."""

    bus: Annotated[
        str | None,
        Setting(
            "URL of the bus: redis://host:port, or store: for the run's own store (default: store:, but an embedded "
            "file for a run in a folder)",
            metavar="URL",
            check=_require_bus,
        ),
    ] = None
    bus_user: Annotated[str | None, Setting("user name on the bus, if its URL has none", metavar="NAME")] = None
    bus_password: Annotated[str | None, Setting("password of the bus", secret=True)] = None
    bus_password_file: Annotated[str | None, Setting("file that holds the password of the bus", metavar="FILE")] = None
    bus_ca: Annotated[
        str | None,
        Setting("PEM file of the authorities that may sign the bus's certificate, for rediss://", metavar="FILE"),
    ] = None


@settings_class
class Seeded:
    """Random numbers."""

    seed: Annotated[
        int,
        Setting(
            "seed of the initial parameters, and of random choices in a demo or simulation", ge=0, le=(1 << 63) - 1
        ),
    ] = 0


@settings_class
class Reported:
    """Reports."""

    json: Annotated[
        str | None,
        Setting(
            "also write the results to this path, as JSON (-: to stdout, and text to stderr)",
            metavar="PATH",
            flag_only=True,
        ),
    ] = None


@settings_class
class Serving:
    """Monitoring and logs."""

    http: Annotated[
        str | None,
        Setting(
            "serve /metrics, /healthz and /livez at this address, e.g. 0.0.0.0:9464 (default: do not)",
            metavar="HOST:PORT",
        ),
    ] = None
    log_format: Annotated[
        str,
        Setting(
            "json: one object per line; text: plain lines; auto: text on a terminal, else json",
            choices=("auto", "json", "text"),
        ),
    ] = "auto"
    log_level: Annotated[str, Setting("lowest level that is logged", choices=("debug", "info", "warning", "error"))] = (
        "info"
    )


def _by_period(which: int) -> str:
    """Return the help text for the default of the outer rate (0) or momentum (1), by H and merge rule."""
    rda, *others = (
        (merge, *(f"{outer_for(merge, h)[which]:g}" for h in (LONG_STEPS, LONG_STEPS + 1))) for merge in MergeRule
    )
    differ = "".join(f"; {name}: {short} and {long}" for name, short, long in others if (short, long) != rda[1:])
    return f"({rda[1]}, or {rda[2]} if H is above {LONG_STEPS}{differ})"


def _sent(name: str) -> str:
    """Return the help text for the default of a codec."""
    return f"({getattr(Rules(), name)}, but {SENT_ISOTROPIC[name]} if --isotropic-up is given)"


def _require_merge(name: str) -> None:
    """Raise `InputError` unless a run can be merged by the rule of this name."""
    if ":" in name:
        raise InputError(
            f"merge {name}: a run cannot use a function of one's own, because all syncers must compute the same bits; "
            f"`isthmus simulate training merge --merge {name}` and `isthmus replay RUN --merge {name}` try it"
        )
    if name not in tuple(MergeRule):
        raise InputError(f"merge {name}: choose one of {', '.join(MergeRule)}")


_RULES = Rules()
OF_RULES, OF_PACE = Setting(within=Rules), Setting(within=Pace)
"""Settings of which the field of the same name in `Rules` or `Pace` says all."""

CODECS = f"{{{','.join(CodecName)},q1.5,…}}"
"""Names of codecs, as the help shows them."""


@settings_class
class ArithmeticOfRun:
    """Rules of the run (fixed when it is created)."""

    fragments: Annotated[int, OF_RULES] = _RULES.fragments
    sync_every: Annotated[int, OF_RULES] = _RULES.sync_every
    sync_every_max: Annotated[int, OF_RULES] = _RULES.sync_every_max
    merge: Annotated[
        str | None,
        Setting(
            "(iso if it is cheap for the model's matrices, else rda)",
            metavar=f"{{{','.join(MergeRule)}}}",
            check=_require_merge,
            within=Rules,
        ),
    ] = None
    iso_block: Annotated[int, OF_RULES] = _RULES.iso_block
    trim: Annotated[float, OF_RULES] = _RULES.trim
    codec: Annotated[
        str | None, Setting(_sent("codec_up"), metavar=CODECS, check=require_codec, within=Rules, of="codec_up")
    ] = None
    codec_down: Annotated[
        str | None, Setting(_sent("codec_down"), metavar=CODECS, check=require_codec, within=Rules)
    ] = None
    isotropic_up: Annotated[bool | None, OF_RULES] = None
    feedback: Annotated[
        bool | None,
        Setting(
            "add what a codec drops to the next update or version, else "
            "discard it but keep the norm (on, unless --isotropic-up)",
            of="error_feedback",
        ),
    ] = None
    outer_lr: Annotated[float | None, Setting(_by_period(0), within=Rules)] = None
    outer_momentum: Annotated[float | None, Setting(_by_period(1), within=Rules)] = None


@settings_class
class PaceOfRun:
    """Pace (each process may override it; default: the run's)."""

    quorum: Annotated[int | None, OF_PACE] = None
    overlap: Annotated[float | None, OF_PACE] = None
    grace: Annotated[float | None, OF_PACE] = None
    staleness: Annotated[int | None, OF_PACE] = None
    lead: Annotated[float | None, OF_PACE] = None
    snapshot_every: Annotated[int | None, OF_PACE] = None
    heartbeat_s: Annotated[float | None, Setting(name="heartbeat", within=Pace)] = None
    silence_s: Annotated[float | None, Setting(name="silence", within=Pace)] = None


@settings_class
class ModelOfRun:
    """The model (fixed when the run is created)."""

    model: Annotated[
        str | None,
        Setting(
            "function that returns the model, a torch module (the built-in byte GPT)", metavar="PACKAGE.MODULE:FUNCTION"
        ),
    ] = None
    source: Annotated[
        str | None,
        Setting("initial parameters: a safetensors file, or a folder", name="from", metavar="PATH"),
    ] = None
    vectors: Annotated[
        list[str] | None, Setting("name patterns of tensors that the merge rule iso leaves to rda", metavar="NAME")
    ] = None


@settings_class
class Participants:
    """Participants."""

    learner: Annotated[list[str] | None, Setting("names of learners", metavar="NAME", flag_only=True)] = None
    series: Annotated[
        list[str] | None,
        Setting("names of series that followers write (isthmus follow --series)", metavar="NAME", flag_only=True),
    ] = None
    strict: Annotated[
        bool,
        Setting(
            "learners read only their own checkpoints, and followers "
            "none: new learners start with fresh moments, and followed models lack running statistics",
            flag_only=True,
        ),
    ] = False


def bus_of(settings: OnBus, run: str) -> str:
    """Return the URL of the bus, with user and password in it. Raises `InputError`."""
    from isthmus.bus import default_bus  # imports asyncio, which `isthmus --help` does not need

    bus = trusting(settings.bus or default_bus(run), settings.bus_ca)
    return as_user(bus, settings.bus_user, settings.bus_password, settings.bus_password_file)


def trust_in(settings: InRun) -> "Trust":
    """Return the key that a command brings to a run, and its demands of the run. Raises `InputError`."""
    from isthmus.log.trust import trust_of  # imports more than `isthmus --help` needs

    key, insecure = getattr(settings, "key", None), getattr(settings, "insecure", False)
    return trust_of(key, settings.owner, insecure, settings.run_digest)


def owner_in(settings: InRun) -> "Trust":
    """Return the demands of a command that only reads a run. It brings no key. Raises `InputError`."""
    from isthmus.log.trust import trust_of

    return trust_of(None, settings.owner, run_digest=settings.run_digest, environment={})


def require_iso_for_blocks(merge: str | None, block: int | None) -> None:
    """Raise `InputError` if blocks are given beside a merge rule that cuts nothing."""
    if block and merge and merge != MergeRule.ISO:
        raise InputError(
            f"--iso-block {block} is for --merge iso, and --merge {merge} cuts no matrix: leave one of the two out"
        )


def rules_of(
    a: ArithmeticOfRun, specs: Sequence[Spec], there: Rules | None = None, flop_s: float = SOUND_FLOP_S
) -> Rules:
    """Return the rules that these settings ask for. Raises `InputError`.

    Settings that were not given get values that suit the model and a machine that makes `flop_s` operations a second.
    If the run exists, they get the values in its rules (`there`).
    """
    require_iso_for_blocks(a.merge, a.iso_block)
    chosen = {s.of: getattr(a, s.field) for s in fields(ArithmeticOfRun)} | {"feedback_down": a.feedback}
    if there is not None:
        chosen = {name: getattr(there, name) if given is None else given for name, given in chosen.items()}
    return Rules.suited(
        specs, flop_s=flop_s, **{name: given for name, given in chosen.items() if given is not None}
    ).check()


def pace_of(a: PaceOfRun, default: Pace) -> Pace:
    """Return the default pace with the values that these settings give. Raises `InputError`."""
    given = {name: value for name in Pace.__struct_fields__ if (value := getattr(a, name)) is not None}
    return msgspec.structs.replace(default, **given).check()


def callable_of(path: str, flag: str) -> Callable[..., Any]:
    """Import PACKAGE.MODULE:FUNCTION, also from the current folder. Raises `InputError` that says what failed."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{flag} {path}: write it as PACKAGE.MODULE:FUNCTION")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    words, sys.argv = sys.argv, [module_name]  # a script that parses them at its top would take ours for its own
    try:
        module = importlib.import_module(module_name)
    except SystemExit:
        raise InputError(
            f"{flag} {path}: importing {module_name} ended the program, as a script does that parses arguments or "
            'trains when it is imported: put what it does below if __name__ == "__main__":'
        ) from None
    except ModuleNotFoundError as error:
        if error.name is None or f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                f"{flag} {path}: there is no module {module_name} in {os.getcwd()}, and none is installed: start the "
                "command in the folder that has it, or install it"
            ) from None
        raise InputError(f"{flag} {path}: {module_name} imports {error.name}, which is not installed") from None
    except Exception as error:
        raise InputError(f"{flag} {path}: importing {module_name} raised {type(error).__name__}: {error}") from error
    finally:
        sys.argv = words
    found = getattr(module, name, None)
    if found is None:
        own = [known for known, value in vars(module).items() if callable(value)]
        raise InputError(f"{flag} {path}: module {module_name} has no {name}{did_you_mean(name, own)}")
    if not callable(found):
        raise InputError(f"{flag} {path}: {name} is not callable")
    return found  # type: ignore[no-any-return]


def own_merge(path: str, flag: str = "--merge") -> "OwnMerge":
    """Return the merge rule PACKAGE.MODULE:FUNCTION, tried on a made-up round. Raises `InputError`."""
    from isthmus.inspect.own_merge import OwnMerge  # imports numba, which `isthmus --help` does not need

    return OwnMerge(f"{flag} {path}", callable_of(path, flag)).require_sound()


def module_of(path: str) -> Any:
    """Return the `torch.nn.Module` that PACKAGE.MODULE:FUNCTION makes. Raises `InputError`."""
    import torch

    made = callable_of(path, "--model")()
    if not isinstance(made, torch.nn.Module):
        raise InputError(f"--model {path} returned {an(type(made).__name__)}, not a torch.nn.Module")
    return made


def built_in(path: str) -> Callable[[], Any] | None:
    """Return the function of this name in `isthmus.demo` that makes a model; None for any other name.

    It must be a function without parameters that a module of that package defines itself, not one that it imports. No
    other module is imported to find out.
    """
    named = _OURS.fullmatch(path)
    if named is None:
        return None
    try:
        found = vars(importlib.import_module(named[1])).get(named[2])
    except ImportError:
        return None
    ours = inspect.isfunction(found) and found.__module__ == named[1] and not inspect.signature(found).parameters
    return found if ours else None


def need(package: str, extra: str) -> None:
    """Raise `InputError`, which says how to install a package, unless it can be imported."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"this needs {package}: pip install '.[{extra}]' in a clone of Isthmus")
