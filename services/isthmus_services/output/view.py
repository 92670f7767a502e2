"""A run on a terminal: the tables of `status`, of `status --watch` and of the demo."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from isthmus.format.records.messages import PARTS, Tally
from isthmus.inspect.bus_view import LearnerView, moved
from isthmus.inspect.status import Ledger, Status
from isthmus.log.evaluations import Series
from isthmus.log.figures import places
from isthmus.log.holes import HOLE
from isthmus.reasons import LOSSLESS, USUAL
from isthmus.wording import listed
from isthmus_services.output.curves import curve, losses
from isthmus_services.output.tables import OR_JSON, Column, fitted

_GONE = ("rejected", "lost")
"""Parts of a ledger whose columns stay on a narrow terminal if a learner has tokens there."""


def tables(status: Status, width: int, hint: str = OR_JSON) -> Group:
    """Return tables and lines of a run at one moment: learners, fragments, syncers, rejected and clipped updates."""
    parts: list[RenderableType] = []
    if status.bus_error:
        parts.append(Text(status.bus_error, style="red"))
    parts += [learners(status, width, hint), fragments(status, width, hint), *syncers(status)]
    if status.sums is not None:
        parts.append(Text(f"run: {totals(status)}"))
    rejected, spare = rejections(status.rejections)
    said = [f"updates rejected: {rejected or 'none'}", *([f"rejected without loss: {spare}"] if spare else [])]
    if status.ledger.rejected:
        said.append(
            f"tokens rejected: {status.ledger.rejected:,.0f} of {status.ledger.processed:,.0f}, in rejected updates or "
            "sent after a shorter update on the same base was merged"
        )
    parts.append(Text("; ".join(said)))
    if gone := lately(status.ledger_before, status.ledger):
        parts.append(Text(gone))
    if messages := ", ".join(f"{reason} {count}" for reason, count in sorted(status.messages_rejected.items())):
        parts.append(Text(f"messages rejected: {messages}"))
    if status.clipped:
        parts.append(Text(f"clipped: {clips(status.updates_clipped, status.clipped)}"))
    return Group(*parts)


def lately(before: Tally, now: Tally) -> str:
    """Return what of the newest tokens was rejected or lost, as text; empty if nothing was.

    Empty, too, if older tokens count otherwise by now: a learner that found no checkpoint counts all before it as lost.
    """
    parts = {part: getattr(now, part) - getattr(before, part) for part in ("processed", *_GONE)}
    if min(parts.values()) < -1 or max(parts.values()) > parts["processed"] + 1:
        return ""
    if max(parts["rejected"], parts["lost"]) < 1 or parts["processed"] < 1 or not before.processed:
        return ""
    share = {part: f"{tokens:,.0f} ({tokens / parts['processed']:.1%})" for part, tokens in parts.items()}
    return (
        f"of the newest {parts['processed']:,.0f} tokens, as far back as the bus has messages: rejected "
        f"{share['rejected']}, lost {share['lost']}"
    )


def clips(updates: int | None, reasons: Mapping[str, int]) -> str:
    """Return clipped updates (None: it is not known how many) and their reasons as text; "none" without any."""
    if not reasons:
        return "none"
    said = ", ".join(_told(reason, count) for reason, count in sorted(reasons.items()))
    more = " (an update may have several reasons)" if len(reasons) > 1 else ""
    return f"by reason {said}{more}" if updates is None else f"{updates} updates: {said}{more}"


def _told(reason: str, count: int) -> str:
    return f"{reason} {count} ({USUAL[reason]})" if reason in USUAL else f"{reason} {count}"


def rejections(counts: Mapping[str, int]) -> tuple[str, str]:
    """Return rejections by reason as two texts: those by which no work is lost (`LOSSLESS`) come second."""
    found = sorted(counts.items())
    return (
        ", ".join(_told(reason, count) for reason, count in found if reason not in LOSSLESS),
        ", ".join(_told(reason, count) for reason, count in found if reason in LOSSLESS),
    )


_LEARNERS = (
    Column("learner", justify="left"),
    Column("incarnation", 9),
    Column("step"),
    Column("tokens/s", 6),
    Column("loss", 1),
    Column("loss over time", 5, justify="left"),
    Column("versions", 3),
    *(Column(part, 2 if part == PARTS[0] else 10) for part in PARTS),
    Column("up MB", 7),
    Column("ckpt MB", 8),
    Column("down MB", 7),
    Column("state", justify="left"),
)


def learners(status: Status, width: int, hint: str = OR_JSON) -> Group:
    """Return a table with a row per learner: its progress, its losses, its ledger, the bytes it moved, and its state.

    If no learner was heard, it has the losses in the log alone. A learner in the log that was not heard, or that was
    expelled, has a row that says so.
    """
    views = status.views
    if not status.hearing.learners and status.losses:
        return losses(status.losses, width, hint)
    times = [point.at for points in status.losses.values() for point in points] or [0.0]
    curves = {name: curve(points, min(times), max(times)) for name, points in status.losses.items()}
    rows = [_learner(status, view, curves.get(view.name, "")) for view in views]
    gone = {part for part in _GONE if getattr(status.ledger, part)}
    columns = [replace(column, leaves=2) if column.name in gone else column for column in _LEARNERS]
    table = fitted("learners", columns, rows, width, hint)
    kept, lost = unsent(views)
    if kept:
        said = f"done; their pending tokens are not in the model, but in their checkpoints: {kept}"
        table.renderables.append(Text(said, style="dim"))
    if lost:
        said = f"done; their pending tokens are not in the model, nor all in a checkpoint: {lost}"
        table.renderables.append(Text(said, style="dim"))
    return table


def unsent(views: Sequence[LearnerView]) -> tuple[str, str]:
    """Return the learners that are done but have pending tokens, each with the share of its tokens that is pending:
    those whose newest checkpoints hold them, and those whose newest checkpoints are older."""
    kept, lost = list[str](), list[str]()
    for view in views:
        left, beat = view.left, view.heartbeat
        if left is not None and left.done and beat is not None and beat.ledger.pending:
            older = left.kept_to is not None and left.kept_to < left.step
            share = beat.ledger.pending / max(beat.ledger.processed, 1.0)
            (lost if older else kept).append(f"{view.name} {share:.1%}")
    return ", ".join(kept), ", ".join(lost)


def _learner(status: Status, view: LearnerView, losses: str) -> list[str]:
    beat, traffic, state = view.heartbeat, view.traffic, status.why_behind(view)
    target = f"/{beat.steps_target}" if beat and beat.steps_target else ""
    heard = view.name in status.hearing.learners
    row = [view.name, str(view.incarnation) if heard else "", f"{view.step}{target}" if heard else ""]
    if beat is None:
        return [*row, "", "", losses, *[""] * (4 + len(PARTS)), state]
    per_step = beat.tokens_seen / max(beat.step, 1)
    return [
        *row,
        f"{per_step / beat.step_s:,.0f}" if beat.step_s else "",
        "" if beat.loss is None else f"{beat.loss:.3f}",
        losses,
        f"{min(beat.versions, default=0)}–{max(beat.versions, default=0)}",
        *(f"{getattr(beat.ledger, part) / max(beat.ledger.processed, 1):.1%}" for part in PARTS),
        f"{traffic.up / 1e6:.1f}",
        f"{traffic.checkpoints / 1e6:.1f}",
        f"{traffic.down / 1e6:.1f}",
        state or "training",
    ]


_FRAGMENTS = (
    Column("fragment"),
    Column("version"),
    Column("age s"),
    Column("merged", 1),
    Column("quorum ms", 6),
    Column("grace ms", 7),
    Column("waited ms", 4),
    Column("period", 5),
    Column("closed by", 3, justify="left"),
    Column("missing", 8, justify="left"),
    Column("writer", 9, justify="left"),
    Column("open round", justify="left"),
)


def fragments(status: Status, width: int, hint: str = OR_JSON) -> Group:
    """Return a table with a row per fragment: its newest commit, and its open round."""
    return fitted("fragments", _FRAGMENTS, [_fragment(status, p) for p in range(len(status.heads))], width, hint)


def _fragment(status: Status, p: int) -> list[str]:
    commit, open_round = status.heads[p], status.hearing.rounds.get(p)
    waits = ""
    if open_round is not None:
        names = ", ".join(sorted(status.waited_for(p)))
        answered = "all have answered"
        if (refused := status.refused(p)) and open_round.answered <= refused.keys():
            answered = f"only answers that are rejected ({', '.join(sorted(set(refused.values())))})"
        waits = f"{open_round.version}: " + (f"waits for {names}" if names else answered)
    if commit is None:
        return [str(p), "0", *[""] * (len(_FRAGMENTS) - 3), waits]
    w = commit.header.waited
    there, count = places(commit.header)
    merged = {given.learner for given in commit.header.inputs}
    missing = [f"{name} (older update in)" if name in merged else name for name in w.missing]
    return [
        str(p),
        str(commit.version),
        f"{max(0.0, status.at - commit.header.written_at):.1f}",
        f"{there}/{count}",
        f"{w.quorum_s * 1e3:.0f}",
        f"{w.grace_s * 1e3:.0f}",
        f"{w.waited_s * 1e3:.0f}",
        f"{math.ceil(commit.header.period)}" if commit.header.period else "",
        w.closed_by if commit.header.healed is None else "healed",
        ", ".join(missing),
        commit.header.writer,
        waits,
    ]


def syncers(status: Status) -> list[Text]:
    """Return a line per syncer, and a line for each of its problems, such as a fragment that it cannot fold."""
    lines = []
    for alive in sorted(status.hearing.syncers.values(), key=lambda a: a.syncer):
        live = "stopped" if alive.stopping else "alive" if alive.syncer in status.syncers_live else "silent"
        holds = "holds" if live == "alive" else "held"
        waiting = f", waiting for {alive.waiting_for}" if alive.waiting_for else ""
        quorum = f", quorum {alive.quorum}" if alive.quorum else ""
        lines.append(
            Text(
                f"syncer {alive.syncer}: {live}, {holds} {alive.held} of {len(alive.heads)} fragments"
                f"{quorum}, {alive.commits:,} commits since its start, loop lag {alive.lag_ms:.0f} ms{waiting}"
            )
        )
        if alive.dropped:
            loudest = ", ".join(f"{count:,} of {who}" for who, count in alive.dropped.items())
            said = f"syncer {alive.syncer} dropped messages because its queue was full: {loudest}; they are sent again"
            more = "if this goes on for minutes, give this syncer a faster machine, or start one more"
            lines.append(Text(f"{said}; {more}", style="yellow"))
        if not alive.able and not alive.stopping:
            lines.append(
                Text(f"syncer {alive.syncer} cannot serve for now: other syncers take over its fragments", style="red")
            )
        for p in alive.broken:
            why = "is slow to read" if p in alive.slow else "may not read" if p in alive.refused else "cannot fold"
            lines.append(Text(f"syncer {alive.syncer} {why} fragment {p}: see its log", style="red"))
        for p in set(alive.holed) - set(status.accepted):
            lines.append(Text(f"syncer {alive.syncer} finds that fragment {p} has {HOLE}: see its log", style="red"))
    return lines


def totals(status: Status) -> str:
    """Return the run in one line: commits, learners, ledger, bytes; participation and updates if they are summed."""
    tokens, sums = status.ledger, status.sums
    shares = " ".join(f"{part} {getattr(tokens, part) / max(tokens.processed, 1):.1%}" for part in PARTS)
    whole = moved(status.hearing.learners.values())
    of = ""
    if sums is not None and sums.participation is not None:
        some = "" if sums.commits == status.commits else f" in {sums.commits:,} of them (isthmus board reads all)"
        of = f", participation {sums.participation:.1%} and {sums.merged:,} updates merged{some}"
    here = "?" if status.bus_error else len(status.live)
    gone = sum(name in status.expelled for name in status.hearing.learners)
    expelled = f" (and {gone} expelled)" if gone else ""
    lacks = f"; not among these, since not heard here: {listed(status.unheard_merged, 3)}"
    unheard = lacks if status.unheard_merged and not status.bus_error else ""
    if status.bus_error and not status.hearing.learners:
        return f"{status.commits:,} commits{of}; learners, tokens and bytes are not known without the bus"
    return (
        f"{status.commits:,} commits, {here} of {len(status.taking_part)} learners here{expelled}{of}, "
        f"{tokens.processed:,.0f} tokens: {shares}, as heard {whole.up / 1e6:.1f} MB up, "
        f"{whole.down / 1e6:.1f} MB down, {whole.checkpoints / 1e6:.1f} MB of checkpoints{unheard}"
    )


def measured(name: str, found: Series) -> Text:
    """Return the last measurement of the global model that counts, and the one before, in one line."""
    said, points = [str(one) for one in found.contested], found.points
    if points:
        before = f" ({points[-2].value:.4g} at {points[-2].cut})" if len(points) > 1 else ""
        said.insert(0, f"{points[-1].value:.4g} at version {points[-1].cut}{before}")
    return Text(f"measured, {name}: {'; '.join(said)}", style="yellow" if found.contested else "")


def ledger(learner: str, found: Ledger, width: int) -> Group:
    """Return a table of one learner's ledger: where the tokens that it processed went, in each fragment."""
    again = found["tokens_trained_again"]
    beyond = f", {again:,} of them beyond a checkpoint and trained again" if again else ""
    title = f"ledger of {learner}: {found['processed']:,} tokens processed{beyond}"
    columns = [Column("fragment"), Column("base"), *(Column(part, n) for n, part in enumerate(PARTS))]
    rows = [
        [str(row["fragment"]), str(row["base"]), *(f"{row[part]:,}" for part in PARTS)] for row in found["fragments"]
    ]
    return fitted(title, columns, rows, width)
