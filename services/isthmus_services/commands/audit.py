"""`isthmus audit RUN`: who agreed on what, what each member contributed, and what of it replay verified, as a file."""

import asyncio
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from isthmus.agent.ports import open_log
from isthmus.codecs import kernels
from isthmus.errors import InputError
from isthmus.format.signing import Signer, armored, fingerprint, public_line, read_signer
from isthmus.inspect.audit import audit
from isthmus.inspect.audit_report import Audit, Institution, Member
from isthmus.inspect.influence import Influence
from isthmus.log import Log
from isthmus.log.figures import updates_rejected
from isthmus.log.polar import require_gpu
from isthmus.wording import counted
from isthmus_services.commands.follow import evaluation
from isthmus_services.output.audit_page import Check, page, spread
from isthmus_services.output.progress import progress
from isthmus_services.output.report import stdout, write_json
from isthmus_services.settings import declared, shared

NAMESPACE = "isthmus-audit"
"""Signing namespace of the report's files."""

SIGNERS = "allowed_signers"
"""The file with the owners' keys, as `ssh-keygen -Y verify` reads it."""


def run(settings: declared.Audit) -> int:
    """Write the audit; return 0, or 1 if a commit differs from what replay computes. Raises `InputError`."""
    members = [name for words in settings.influence or () for name in words.split(",") if name]
    if settings.exec is not None and not (members and settings.exec.split()):
        raise InputError("--exec CMD evaluates the model without a member: add --influence MEMBER, and a command")
    signer = read_signer(settings.sign) if settings.sign else None
    if signer is not None and not (settings.html or settings.json):
        raise InputError("--sign signs the report's files: add --html FILE or --json PATH")
    kernels.warm()
    if settings.gpu:
        require_gpu()
    return asyncio.run(_audit(settings, members, signer))


async def _audit(settings: declared.Audit, members: Sequence[str], signer: Signer | None) -> int:
    async with open_log(settings.run, shared.owner_in(settings), threads=settings.threads, gpu=settings.gpu) as log:
        name = _owner(log, signer)
        with progress("auditing") as say:
            found = await audit(
                log,
                period_s=settings.period * 3600.0 if settings.period is not None else None,
                leave_out=members,
                last=settings.last,
                evaluate=evaluation(log, shlex.split(settings.exec)) if settings.exec else None,
                at_once=settings.threads,
                progress=say,
            )
        owners = log.members.current.owners if log.members.signed else {}
    headline, console = found.headline, stdout()
    style = {"good": "", "amber": "yellow", "bad": "red"}[headline.level]
    console.print(Text(headline.said, style=style), soft_wrap=True)
    for line in [f"  {made}" for made in found.replay.outdated_together] + _summary(found):
        console.print(Text(line), soft_wrap=True)
    _write(settings, found, owners, signer, name)
    return 0 if found.sound else 1


def _owner(log: Log, signer: Signer | None) -> str:
    """Return the owner's name under which a signature is checked. Raises `InputError` if the key is no owner's."""
    if signer is None:
        return ""
    owners = log.members.current.owners if log.members.signed else {}
    if signer.author not in owners:
        known = ", ".join(f"{name} {fingerprint(key)}" for key, name in owners.items()) or "none: it is unsigned"
        raise InputError(f"--sign: the key {fingerprint(signer.author)} is no owner's; owners of this run are {known}")
    return _principal(owners[signer.author])


def _principal(name: str) -> str:
    """Return an owner's name as `ssh-keygen` takes it. Names in a charter have no spaces."""
    return "owner" if " " in name else name


def _summary(a: Audit) -> list[str]:
    """Return the audit in about ten lines, without its headline."""
    tokens, updates = sum(p.tokens for p in a.periods), sum(p.updates for p in a.periods)
    clipped = sum(m.total.cut for m in a.members)
    rejections = sum((Counter(m.total.rejections) for m in a.members), Counter(a.rejections_unlisted))
    rejected = updates_rejected(rejections)
    spared = rejections.total() - rejected
    gone = [m.name for m in a.members if m.gone is not None]
    missing = sum(bool(m.missing) for m in a.manifests)
    sound = [p for p in a.promotions if not p.fault]
    several = sum(bool(p.others) for p in sound)
    waiting = len({w.learner for u in a.unfinished for w in u.updates})
    return [
        f"{a.run['url']}: {a.replay.commits} commits, {updates} updates, {tokens:,.0f} tokens",
        f"tokens by member: {_parts(a.members, tokens)}",
        *([f"tokens by institution: {_parts(a.institutions, tokens)}"] if a.grouped else []),
        _worked(a),
        "participation: no commit" if a.participation is None else
        f"participation: {a.participation:.1%} of a round's learners, mean over commits; of all commits, {_within(a)}",
        f"{clipped} updates were clipped, {rejected} updates rejected; rejected without loss: {spared}",
        f"{len(a.memberships)} versions of the membership" + (f"; removed: {', '.join(gone)}" if gone else ""),
        f"{len(a.manifests)} manifests" + (f", {missing} of them missing" if missing else ""),
        f"{len(sound)} promotions hold, {len(a.promotions) - len(sound)} do not"
        + (f"; the last is of version {sound[-1].version}" if sound else "")
        + (f"; {several} rest on one of several numbers of an evaluator" if several else ""),
        f"{len(a.restarts)} starts of learners, {len(a.heals)} heals, {waiting} learners in unfinished rounds",
        _window(a.influence) + ("; ".join(map(_influenced, a.influence)) or "not computed (--influence MEMBER)"),
    ]  # fmt: skip


def _parts(took: Sequence[Member | Institution], tokens: float) -> str:
    """Return whose updates have the most tokens, as shares of all."""
    found = sorted((m for m in took if m.total.updates), key=lambda m: -m.total.tokens)
    first = ", ".join(f"{m.name} {m.total.tokens / tokens:.0%}" for m in found[:4]) if tokens else "nobody"
    return first + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _worked(a: Audit) -> str:
    """Return what became of the work, in tokens: what the log has, and what learners state."""
    held, processed = sum(w.held for w in a.work), sum(w.processed or 0 for w in a.work)
    said = [w.stated for w in a.work if w.stated is not None]
    parts = ("merged", "overwritten", "late", "pending", "rejected", "lost")
    stated = ", ".join(f"{part} {sum(getattr(one, part) for one in said):,.0f}" for part in parts)
    return (
        f"learners state {processed:,} tokens processed up to their newest merged updates; {held:,.0f} are in updates "
        "that a round could still merge; "
        + (
            f"of {sum(one.processed for one in said):,} tokens up to {counted(len(said), 'checkpoint')}: {stated} "
            "(what was merged since then counts as pending)"
            if said
            else "no checkpoint says what else was lost"
        )
    )


def _within(a: Audit) -> str:
    """Return of how many commits the members have a part that have most."""
    found = sorted((m for m in a.members if m.total.in_commits), key=lambda m: -m.total.in_commits)
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return ", ".join(f"{m.name} in {m.total.in_commits / a.replay.commits:.0%}" for m in found[:4]) + more


def _window(found: Sequence[Influence]) -> str:
    """Return over which rounds influence was computed: those before them stay as they are in both models."""
    if not found:
        return "influence: "
    one = found[0]
    every = f"{spread(one.foldable)} rounds of each fragment"
    if one.foldable != one.heads:
        every += " that can be folded"
    if one.rounds and max(one.foldable) > one.rounds:
        return f"influence over the newest {one.rounds} of {every} (--last 0: all): "
    return f"influence over all {every}: "


def _influenced(i: Influence) -> str:
    if i.fault or i.relative is None:
        return f"without {i.name}: {i.fault or 'nothing moved'}"
    known = i.loss is not None and i.loss_without is not None
    losses = f", held-out loss {i.loss_without:.4g} instead of {i.loss:.4g}" if known else ""
    return f"without {i.name}, {i.relative:.1%} of the movement away{losses}; {i.seconds:.1f} s"


def _write(settings: declared.Audit, found: Audit, owners: dict[bytes, str], signer: Signer | None, name: str) -> None:
    """Write the files, and their signatures. Raises `InputError` if one cannot be written."""
    files = [Path(path) for path in (settings.json, settings.html) if path]
    write_json(asdict(found) | {"headline": asdict(found.headline)}, settings.json)
    if settings.html:
        check = Check(
            [(owner, fingerprint(key)) for key, owner in owners.items()],
            name,
            _command(name, Path(settings.html)) if signer else "",
        )
        _put(Path(settings.html), page(found, check))
    for path in files:
        print(f"{path}: {path.stat().st_size / 1e3:,.0f} kB")
    if signer is None:
        return
    for path in files:
        signature = signer.sign(NAMESPACE, path.read_bytes())
        _put(path.with_name(path.name + ".sig"), armored(signer.author, NAMESPACE, signature))
    lines = [f'{_principal(owner)} namespaces="{NAMESPACE}" {public_line(key)}\n' for key, owner in owners.items()]
    for folder in {path.parent for path in files}:
        _put(folder / SIGNERS, "".join(lines))
    print(f"check it with OpenSSH, after you have compared the keys in {SIGNERS} with those that you know:")
    for path in files:
        enter = "" if path.parent == Path() else f"cd {shlex.quote(str(path.parent))} && "
        print(f"  {enter}{_command(name, path)}")


def _command(name: str, path: Path) -> str:
    file = shlex.quote(path.name)
    return f"ssh-keygen -Y verify -f {SIGNERS} -I {name} -n {NAMESPACE} -s {shlex.quote(path.name + '.sig')} < {file}"


def _put(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
