"""The run object: what the run is. Every process that joins checks itself against it."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgpack
import msgspec

from isthmus.codecs import kernels
from isthmus.errors import (
    Denied,
    InputError,
    IsthmusError,
    LayoutMismatch,
    LogCorrupt,
    ObjectMissing,
    RecordInvalid,
    RunExists,
    RunMissing,
)
from isthmus.format.layout import Layout, Spec, first_difference, place
from isthmus.format.records import frame
from isthmus.format.records.keys import MEMBERS, RUN_KEY, UPDATES, commit_key, members_key
from isthmus.format.records.objects import RunHeader, RunLayout, TensorSpec
from isthmus.format.rules import Pace, Rules
from isthmus.format.signing.points import is_small_order
from isthmus.reasons import Reason
from isthmus.store import Store, checked
from isthmus.store.base import is_there

UNTOLD = bytes(32)
"""Stands for the digest of a frozen parameter that a learner was told to trust: it matches any digest."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as every process sees it."""

    url: str
    digest: bytes
    """Digest of the run object: the identity of the run."""
    header: RunHeader
    layout: Layout
    frozen: dict[str, bytes]
    blob: frame.Blob = field(default=b"", repr=False, compare=False)
    """The bytes of the run object; empty if the run was told by another process of the same learner."""

    @property
    def rules(self) -> Rules:
        """The arithmetic, which never changes."""
        return self.header.rules

    @property
    def pace(self) -> Pace:
        """The default pace."""
        return self.header.pace

    @property
    def shares(self) -> list[float]:
        """Each fragment's share of the parameters."""
        return [f.size / self.layout.size for f in self.layout.fragments]

    def require(self, specs: Sequence[Spec], frozen: dict[str, bytes]) -> None:
        """Raise `LayoutMismatch`, naming the first difference, if this model is not the run's."""
        difference = first_difference(specs, self.layout.specs)
        if difference is not None:
            trained, ours = {spec.name for spec in self.layout.specs}, {spec.name for spec in specs}
            if alone := next((name for name in sorted(trained - ours) if name in frozen), None):
                difference = f"parameter {alone!r} is frozen here, and trained in the run"
            elif alone := next((name for name in sorted(ours - trained) if name in self.frozen), None):
                difference = f"parameter {alone!r} is trained here, and frozen in the run"
        else:
            for name in sorted(self.frozen.keys() | frozen.keys()):
                if name not in frozen or name not in self.frozen:
                    where = "here" if name in frozen else "in the run"
                    difference = f"parameter {name!r} is frozen only {where}"
                    break
                if frozen[name] != self.frozen[name] and UNTOLD not in (frozen[name], self.frozen[name]):
                    difference = (
                        f"frozen parameter {name!r} is stored in other bytes here than in the run: its values, dtype "
                        "or quantisation differ"
                    )
                    break
        if difference is not None:
            made = f"{self.header.model} made its model" if self.header.model else "its model was passed to join"
            raise LayoutMismatch(
                difference, f"use the model that {self.url} was created with ({made}), or another address for this one"
            )

    def require_rules(self, rules: Rules, remedy: str = "") -> None:
        """Raise `RunExists`, naming the differences, if these are not the run's rules; `remedy`: what to do."""
        both = [(name, getattr(self.rules, name), ours) for name, ours in msgspec.structs.asdict(rules).items()]
        if unlike := [f"{name} is {theirs} there, not {ours}" for name, theirs, ours in both if theirs != ours]:
            raise RunExists(self.url, ", ".join(unlike), remedy)


class _Told(msgspec.Struct, frozen=True, array_like=True):
    url: str
    digest: bytes
    header: RunHeader
    layout: RunLayout


def told_run(run: Run) -> bytes:
    """Encode a run for another process of the same learner; `heard_run` decodes it."""
    return msgspec.msgpack.encode(_Told(run.url, run.digest, run.header, described(run.layout, run.frozen)))


def heard_run(words: bytes) -> Run:
    """Return the run that `told_run` encoded."""
    told = msgspec.msgpack.decode(words, type=_Told)
    return Run(told.url, told.digest, told.header, _placed(told.layout), dict(told.layout.frozen))


Require = Callable[[str, frame.Blob], None]
"""Checks a run object, found at a URL, before its contents are decoded. Raises `InputError`."""


LAYOUT_MOST = 64 << 20
"""Most bytes of a layout that are read. A tensor takes some 100 bytes."""


UNREADABLE = (
    "if another release created the run, use that one; else end no syncer: move this object away, and one that runs "
    "writes it again within a minute (in a signed run few may, and its log says so); if none runs, restore it from a "
    "backup"
)
"""What to do about a run object that cannot be read."""


def anything(url: str, blob: frame.Blob) -> None:
    """Accept any run object."""


async def read_run(store: Store, require: Require = anything) -> Run:
    """Return the run in this store.

    Raises `RunMissing` (with `beside` if objects of a run are there without it), what `require` raises, `LogCorrupt`
    for a run object that cannot be read, and `InputError` if the run uses another arithmetic than this release.
    """
    try:
        blob = await checked.whole(store, RUN_KEY, frame.Kind.RUN, LAYOUT_MOST)
    except ObjectMissing:
        raise RunMissing(store.url, beside=await _left_in(store)) from None
    except RecordInvalid as error:
        raise LogCorrupt(f"{store.url}/{RUN_KEY}", f"not a run object of this release: {error}; {UNREADABLE}") from None
    require(store.url, blob)
    try:
        header, cut = parsed(blob)
        _require_owner(blob, header)
        layout = _placed(cut)
    except (RecordInvalid, msgspec.ValidationError, ValueError) as error:
        raise LogCorrupt(f"{store.url}/{RUN_KEY}", f"not a run object of this release: {error}; {UNREADABLE}") from None
    if len(layout.fragments) != len(header.snapshots):
        raise LogCorrupt(f"{store.url}/{RUN_KEY}", "fragments and snapshots differ in number")
    if header.arithmetic != kernels.ARITHMETIC:
        raise InputError(
            f"{store.url}: this run uses arithmetic {header.arithmetic}, this release has {kernels.ARITHMETIC}: "
            "use the release that created the run"
        )
    return Run(store.url, frame.digest(blob), header, layout, dict(cut.frozen), blob)


def _require_owner(blob: frame.Blob, header: RunHeader) -> None:
    """Raise `RecordInvalid` unless a run object is signed by the owner that it names, or names none and is unsigned."""
    author = frame.author_of(blob)
    if header.owner is None:
        if author != frame.UNSIGNED_AUTHOR:
            raise RecordInvalid(Reason.MALFORMED, "it is signed, and names no owner")
    elif frame.require_signature(blob, frame.Kind.RUN) != header.owner or is_small_order(header.owner):
        raise RecordInvalid(Reason.NOT_A_MEMBER, "it is not signed by the owner that it names")


async def _left_in(store: Store) -> str:
    """Return a prefix below which objects lie that only a running run writes; empty if there is none.

    What an unfinished `init` leaves (snapshots) does not count, nor a run that was created meanwhile. First commits
    and memberships are never deleted, so two reads find those of most runs; other objects are found where listing is
    permitted. Raises `Unavailable`.
    """
    found = ""
    for key in (commit_key(0, 1), members_key(1)):
        with contextlib.suppress(Denied):
            found = found or (f"{key.partition('/')[0]}/" if await is_there(store, key) else "")
    for prefix in ("commits/", MEMBERS, UPDATES):
        with contextlib.suppress(Denied):
            found = found or (prefix if await store.list(prefix) else "")
    if found:
        with contextlib.suppress(Denied):
            return "" if await is_there(store, RUN_KEY) else found
    return found


async def run_below(store: Store) -> str:
    """Return the URL of a run in a folder `run` below this store, such as a demo makes; empty if there is none."""
    with contextlib.suppress(IsthmusError):
        if await store.get_range(f"{RUN_KEY}/{RUN_KEY}", 0, 1):
            return f"{store.url.rstrip('/')}/{RUN_KEY}"
    return ""


def described(layout: Layout, frozen: dict[str, bytes]) -> RunLayout:
    """Return the run object's form of a layout, with the digests of frozen parameters."""
    return RunLayout(
        tensors=tuple(
            TensorSpec(
                name=s.name,
                shape=s.shape,
                dtype=s.dtype,  # type: ignore[arg-type]
                role=s.role,
                fragment=cuts[0][0],
                cuts=cuts if len(cuts) > 1 else (),
            )
            for s, cuts in zip(layout.specs, layout.placement, strict=True)
        ),
        frozen=frozen,
    )


def _placed(cut: RunLayout) -> Layout:
    specs = [Spec(t.name, t.shape, t.dtype, t.role) for t in cut.tensors]
    return place(specs, [t.cuts or ((t.fragment, t.shape[0] if t.shape else 1),) for t in cut.tensors])


def parsed(blob: frame.Blob) -> tuple[RunHeader, RunLayout]:
    """Return the header and the layout of a run object. Raises `RecordInvalid`, `ValidationError` or `ValueError`."""
    header, payload = frame.parse(blob, frame.Kind.RUN, RunHeader)
    if frame.digest(payload) != header.layout:
        raise RecordInvalid(Reason.MALFORMED, "its layout does not match its digest")
    plain = msgpack.unpackb(payload, raw=False, use_list=False, strict_map_key=True, max_ext_len=0)
    return header, msgspec.convert(plain, RunLayout, builtin_types=(bytes,))
