"""An audit as one HTML file that opens offline: no script, and everything that participants wrote is escaped."""

import base64
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from isthmus.errors import legible
from isthmus.inspect.audit_report import Audit, Member, Number
from isthmus.inspect.audit_sums import Figures
from isthmus.reasons import Clip, Reason
from isthmus.wording import lasting

SHOWN_MOST = 7
"""The most members with a colour of their own in a chart; the others share one."""

STYLE = """
:root { --ground: #fff; --panel: #f5f7fa; --line: #c9d1db; --text: #17202b; --soft: #4c5969; --good: #00664b;
  --amber: #b35c00; --bad: #a3330a; --c0: #0072b2; --c1: #b35c00; --c2: #007a5a; --c3: #a64d84; --c4: #2f86b8;
  --c5: #b84300; --c6: #6b6b00; --c7: #444; }
@media (prefers-color-scheme: dark) { :root { --ground: #12171d; --panel: #1b222b; --line: #3a4654; --text: #e8edf3;
  --soft: #aab6c4; --good: #5fd9b0; --amber: #e69f00; --bad: #ff9d76; --c0: #56b4e9; --c1: #e69f00; --c2: #35c79a;
  --c3: #e08cc0; --c4: #8fd0f5; --c5: #ff8f4d; --c6: #d9d04a; --c7: #c8c8c8; } }
* { box-sizing: border-box; }
html { font: 16px/1.5 system-ui, sans-serif; background: var(--ground); color: var(--text); }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; }
p { margin: .4rem 0; max-width: 60rem; overflow-wrap: anywhere; }
code, pre { font: .88em ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .7rem;
  margin: .4rem 0; }
.soft { color: var(--soft); font-size: .9rem; }
.good, .amber, .bad { border-left: .3rem solid var(--good); background: var(--panel); padding: .4rem .8rem;
  font-size: 1.1rem; }
.amber { border-color: var(--amber); }
.bad { border-color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.tiles div { background: var(--panel); border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .7rem; }
.tiles dt { color: var(--soft); font-size: .9rem; }
.tiles dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .7rem;
  min-width: 0; }
figcaption { font-weight: 600; }
svg { display: block; width: 100%; }
.bars { height: 11rem; border-bottom: 1px solid var(--line); }
.strip { height: 1.4rem; border: 1px solid var(--line); }
.span { display: flex; justify-content: space-between; gap: 1rem; color: var(--soft); font-size: .85rem; }
.rows { display: grid; grid-template-columns: minmax(5rem, max-content) 1fr max-content; gap: .25rem .6rem;
  align-items: center; font-size: .9rem; margin: .4rem 0; }
.rows > span { overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; list-style: none; padding: 0; margin: .3rem 0;
  font-size: .88rem; }
.legend li { display: flex; align-items: center; gap: .35rem; overflow-wrap: anywhere; }
.legend svg { width: 1.2rem; height: .7rem; flex: none; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); }
.c4 { fill: var(--c4); } .c5 { fill: var(--c5); } .c6 { fill: var(--c6); } .c7 { fill: var(--c7); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums;
  margin: .4rem 0; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--panel); vertical-align: bottom; }
th.left, td.left { text-align: left; }
td.left { overflow-wrap: break-word; }
td:first-child { overflow-wrap: break-word; }
tr.part td { color: var(--soft); }
tr.part td:first-child { padding-left: 1.8rem; }
details { margin: .3rem 0; }
summary { cursor: pointer; }
@media (max-width: 48rem) {
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody, tr, td { display: block; }
  tr { border: 1px solid var(--line); border-radius: .4rem; padding: .3rem .6rem; margin: .5rem 0; }
  td, td.left { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0;
    text-align: right; }
  td:first-child { font-weight: 600; }
  tr.part { margin-left: 1rem; }
  tr.part td:first-child { padding-left: 0; }
  td:has(> span:empty) { display: none; }
  td::before { content: attr(data-name); color: var(--soft); font-weight: 400; text-align: left; flex: none; }
  td > * { min-width: 0; overflow-wrap: anywhere; }
}
"""


class Check(NamedTuple):
    """How the file is checked."""

    owners: Sequence[tuple[str, str]]
    """Names of the owners and fingerprints of their keys."""
    signer: str
    command: str
    """The owner who signed the file, and the command that checks this; empty: it is not signed."""


def page(report: Audit, check: Check) -> str:
    """Return the whole file."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    parts = [*_head(report, check), *(part for section in _SECTIONS for part in section(report)), *_checked(check)]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'\">\n"
        f"<title>Audit of {_t(report.run['url'])}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


# --- pieces -----------------------------------------------------------------------------------------------------------


def _t(text: object) -> str:
    """Return text of others for HTML: no markup, and nothing invisible."""
    return escape(legible(str(text)))


def _at(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def spread(numbers: Sequence[int]) -> str:
    """Return a number of each fragment in words: `62`, or `60 to 63` if they differ."""
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{_t(name)} {count:,}" for name, count in counts.items()) or "–"


class _Column(NamedTuple):
    name: str
    left: bool = False


class _Row(NamedTuple):
    cells: Sequence[str]
    """HTML."""
    part: bool = False
    """Whether the row is a part of the row before it."""


def _table(columns: Sequence[_Column], rows: Iterable[_Row | Sequence[str]]) -> list[str]:
    """Return a table, of which each row is a card on a narrow screen. Cells are HTML."""
    found = [row if isinstance(row, _Row) else _Row(row) for row in rows]
    if not found:
        return ["<p>None.</p>"]
    side = [' class="left"' if c.left else "" for c in columns]
    lines = ["<table>", "<thead><tr>"]
    lines += [f'<th scope="col"{left}>{c.name}</th>' for c, left in zip(columns, side, strict=True)]
    lines += ["</tr></thead>", "<tbody>"]
    for row in found:
        cells = zip(row.cells, columns, side, strict=True)
        kind = ' class="part"' if row.part else ""
        lines.append(
            f"<tr{kind}>"
            + "".join(f'<td{left} data-name="{c.name}"><span>{cell}</span></td>' for cell, c, left in cells)
            + "</tr>"
        )
    return [*lines, "</tbody>", "</table>"]


def _columns(names: str, left: str) -> list[_Column]:
    lefts = left.split(", ")
    return [_Column(name, name in lefts) for name in names.split(", ")]


# --- sections ---------------------------------------------------------------------------------------------------------


def _head(a: Audit, check: Check) -> list[str]:
    headline = a.headline
    by = (
        f"{_t(check.signer)} signed it: the last section says how to check that" if check.signer else "nobody signed it"
    )
    signed = (
        "Each member signs what it writes there; the audit checked every signature that it relies on."
        if a.run["owner"]
        else "The run itself is not signed."
    )
    verdict = f"{headline.said[0].upper()}{headline.said[1:]}." + (" See below." if headline.remarks else "")
    tokens, updates = sum(p.tokens for p in a.periods), sum(p.updates for p in a.periods)
    removed = sum(m.gone is not None for m in a.members)
    tiles = {
        "members": f"{sum(m.since > 0 and m.gone is None for m in a.members):,}"
        + f", {removed} removed" * (removed > 0)
        if a.run["owner"]
        else "",
        "learners": "" if a.run["owner"] else f"{sum('learner' in m.roles for m in a.members):,}",
        "institutions": f"{len(a.institutions):,}" if a.grouped else "",
        "versions of the membership": f"{len(a.memberships):,}",
        "commits": f"{a.replay.commits:,}",
        "updates merged": f"{updates:,}",
        "tokens in commits": f"{tokens:,.0f}",
        "participation": _share(a.participation),
        "promotions that hold": f"{sum(not p.fault for p in a.promotions):,}",
        "heals": f"{len(a.heals):,}",
    }
    lines = [
        f"<h1>Audit of {_t(a.run['url'])}</h1>",
        f'<p class="soft">run <code>{_t(a.run["digest"])}</code>, created {_at(_float(a.run["created_at"]))}; audited '
        f"{_at(a.written_at)} with isthmus {_t(a.isthmus)}</p>",
        f"<p>{_t(a.run['purpose'])}</p>" if a.run["purpose"] else "",
        f"<p>This report was computed from the run’s log, and {by}. {signed}</p>",
        f'<p class="{headline.level}">{_t(verdict)}</p>',
        '<p class="soft">A commit is one merge of updates. Replay merged the recorded updates again by the run’s '
        "rules, and compared every bit of the results with what syncers had recorded.</p>",
        '<dl class="tiles">',
        *(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items() if value),
        "</dl>",
    ]
    if a.not_read:
        lines += ["<p>This reader could not read:</p>", "<pre>" + "\n".join(map(_t, a.not_read)) + "</pre>"]
    return lines


def _float(value: object) -> float:
    assert isinstance(value, float | int), value
    return float(value)


FIGURES = "updates, tokens, weight, movement, in commits, participation, clipped, rejections, updates rejected"


def _cells(f: Figures, commits: int) -> list[str]:
    """Return the figures of a span of time in which so many commits were written."""
    within = _share(f.in_commits / commits) if f.expected or f.in_commits else "–"
    return [
        f"{f.updates:,}", f"{f.tokens:,.0f}", _share(f.weight_share), _share(f.movement_share), within,
        _share(f.participation), _counts(f.clipped), _counts(f.rejections), f"{f.updates_rejected:,}",
    ]  # fmt: skip


def _took_part(a: Audit) -> list[Member]:
    """Return the members that did something or were waited for, those with most tokens first."""
    found = [m for m in a.members if m.total.updates or m.total.expected or m.total.rejections]
    return sorted(found, key=lambda m: (-m.total.tokens, m.name))


def _institutions(a: Audit) -> list[str]:
    """Return what the members of each institution did together."""
    if not a.grouped:
        return [
            "<h2>Institutions</h2>",
            "<p>The charter names no institutions, so each member counts for itself. One institution may have several "
            "members.</p>",
        ]
    found = sorted(a.institutions, key=lambda i: (-i.total.tokens, i.name))
    whole = a.replay.commits
    rows = [[_t(i.name), ", ".join(map(_t, i.members)), f"{i.commits:,}", *_cells(i.total, whole)] for i in found]
    columns = _columns(f"institution, members, commits written, {FIGURES}", "institution, members, clipped, rejections")
    note = "The charter says which members are of one institution. A member of none stands for itself."
    return ["<h2>Institutions</h2>", f'<p class="soft">{note}</p>', *_table(columns, rows)]


def _whose(a: Audit) -> str:
    """Return the heading of those who took part: of an unsigned run, nobody is a member."""
    return "Members" if a.run["owner"] else "Learners"


def _members(a: Audit) -> list[str]:
    rows = list[_Row]()
    for m in sorted(a.members, key=lambda m: ("learner" not in m.roles, -m.total.tokens, m.name)):
        terms = [f"factor {m.factor:g}"] if m.factor != 1.0 else []
        terms += [f"cap {m.cap:g}"] if m.cap else []
        terms += [f"sources {', '.join(map(_t, m.sources))}"] if m.sources else []
        there = f"from version {m.since}" + (f" until {m.gone} removed it" if m.gone else "") if m.since else "–"
        role = ", ".join(map(_t, m.roles)) + (f" ({m.commits:,} commits)" if m.commits else "")
        rows.append(_Row([_t(m.name), role, there, "; ".join(terms) or "–", *_cells(m.total, a.replay.commits)]))
        if [one.name for one in m.learners] != [m.name]:
            parts = [(one.name, _cells(one.total, a.replay.commits)) for one in m.learners]
            rows += [_Row([_t(name), "", "", "", *cells], part=True) for name, cells in parts]
    columns = _columns(
        f"member, role, membership, terms, {FIGURES}", "member, role, membership, terms, clipped, rejections"
    )
    note = "Weight and movement are shares of the whole run."
    if a.run["owner"]:
        note = (
            "A member is a key, and does what its role allows. Membership names the versions below that admitted and "
            f"removed it. {note}"
        )
    lines = [f"<h2>{_whose(a)}</h2>", f'<p class="soft">{note}</p>', *_table(columns, rows)]
    if a.rejections_unlisted:
        lines.append(
            f"<p>Rejections that commits counted without naming the learner: {_counts(a.rejections_unlisted)}.</p>"
        )
    return lines + _meanings(a)


PAGE_NAMES = {"updates_rejected": "updates rejected", "in_commits": "in commits"}
"""Figures that the page's columns name otherwise than the JSON."""


def _work(a: Audit) -> list[str]:
    """Return what became of each learner's tokens: what the log has, and what only the learner states."""
    parts = ("merged", "overwritten", "late", "pending", "rejected", "lost")
    rows = list[list[str]]()
    for w in a.work:
        said = w.stated
        known = [said.step, said.processed, *(getattr(said, part) for part in parts)] if said else []
        stated = [f"{value:,.0f}" for value in known]
        rows.append(
            [
                _t(w.learner), f"{w.merged:,.0f}", f"{w.held:,.0f}", "–" if w.processed is None else f"{w.processed:,}",
                *(stated or ["–"] * (2 + len(parts))),
            ]
        )  # fmt: skip
    columns = _columns(
        "learner, in commits, in no commit yet, processed by commits, checkpoint of step, "
        "processed by checkpoint, " + ", ".join(parts), "learner",
    )  # fmt: skip
    note = (
        "All in tokens, each fragment’s counted by its share of the parameters. In commits: in merged updates. In no "
        "commit yet: in updates that could still be merged. These two are of the log and the store; the other figures "
        "are what each learner states, and nobody checked them: how many tokens it had processed, in all "
        "incarnations, at its newest merged update (by commits) and at its newest checkpoint, and what became of the "
        "latter. Tokens that were trained again after a kill count each time. The log cannot know more: a "
        "commit names a rejected update without its tokens, and work that a version overwrote, or that was lost with a "
        "process, is in no update. "
        "Overwritten: trained after an update, and replaced by the next version. Late: in updates that came too late "
        "for any round, or after their learner had been removed. Pending: not settled yet. Rejected: in rejected "
        "updates, or sent after a shorter update on the same base had been merged. Lost: gone with a process, and in "
        "no update."
    )
    removed = {m.name: m.gone for m in a.members if m.gone}
    gone = [
        f"<p>{_t(w.learner)} was removed by membership {removed[w.member]}: what it sent after that counts as late.</p>"
        for w in a.work
        if w.member in removed
    ]
    return ["<h2>What became of the work</h2>", f'<p class="soft">{note}</p>', *_table(columns, rows), *gone]


def _meanings(a: Audit) -> list[str]:
    """Return what the columns mean, and the reasons that are in them."""
    rows = [
        [PAGE_NAMES.get(name, name), _t(text)]
        for name, text in a.definitions.items()
        if name not in ("cut", "verified")
    ]
    named = {reason for m in a.members for reason in (*m.total.clipped, *m.total.rejections)} | set(
        a.rejections_unlisted
    )
    reasons = [[_t(r.value), _t(r.means)] for r in (*Clip, *Reason) if r.value in named]
    return [
        "<details><summary>What the columns mean</summary>",
        *_table(_columns("figure, meaning", "figure, meaning"), rows), "</details>",
        "<details><summary>What the reasons mean</summary>",
        *_table(_columns("reason, meaning", "reason, meaning"), reasons), "</details>",
    ]  # fmt: skip


Value = Callable[[Figures], float]


def _charts(a: Audit) -> list[str]:
    members = _took_part(a)
    if not members:
        return []
    begin, end, count = a.periods[0].begin, a.periods[-1].end, len(a.periods)
    span = f'<div class="span"><span>{_at(begin)}</span><span>{_at(end)}</span></div>'
    colours = [min(n, SHOWN_MOST) for n in range(len(members))]
    legend = ['<ul class="legend">']
    legend += [
        f'<li><svg viewBox="0 0 1 1" preserveAspectRatio="none"><rect class="c{n}" width="1" height="1"/></svg>'
        f"{_t(m.name)}</li>"
        for m, n in zip(members[:SHOWN_MOST], colours, strict=False)
    ]
    if len(members) > SHOWN_MOST:
        legend.append(
            '<li><svg viewBox="0 0 1 1"><rect class="c7" width="1" height="1"/></svg>'
            f"{len(members) - SHOWN_MOST} others</li>"
        )
    legend.append("</ul>")
    tokens: Value = lambda f: f.tokens  # noqa: E731
    movement: Value = lambda f: f.movement  # noqa: E731
    most = max(p.tokens for p in a.periods)
    lines = [
        "<h2>By period</h2>",
        f"<p class=\"soft\">{count} periods of {lasting((end - begin) / count)}</p>",
        '<div class="charts">',
        "<figure><figcaption>Tokens merged in each period</figcaption>",
        f'<div class="span"><span>{most:,.0f} at most</span></div>',
        *_bars(a, members, colours, tokens, [most] * count, "tokens by period", lambda v, whole: f"{v:,.0f} tokens"),
        span, *legend, "</figure>",
        "<figure><figcaption>Shares of the model’s movement in each period</figcaption>",
        '<div class="span"><span>100%</span></div>',
        *_bars(
            a, members, colours, movement, [p.movement for p in a.periods], "movement by period",
            lambda v, whole: f"{v / whole:.1%}",
        ),
        span, *legend, "</figure>",
        "<figure><figcaption>Participation in each period (the stronger the colour, the more)</figcaption>",
        '<div class="rows">',
    ]  # fmt: skip
    for m, colour in zip(members, colours, strict=True):
        cells = "".join(
            f'<rect class="c{colour}" x="{n}" width="1.02" height="1" fill-opacity="{f.participation:.3f}">'
            f"<title>{_at(p.begin)}: {_share(f.participation)} of {f.expected}</title></rect>"
            for n, (p, f) in enumerate(zip(a.periods, m.periods, strict=True))
            if f.participation
        )
        box = f'viewBox="0 0 {count} 1" preserveAspectRatio="none" role="img" aria-label="{_t(m.name)}"'
        strip = f'<svg class="strip" {box}>{cells}</svg>'
        lines.append(f"<span>{_t(m.name)}</span>{strip}<span>{_share(m.total.participation)}</span>")
    lines += ["</div>", span, "</figure>", "</div>"]
    for m in members:
        rows = [
            [_at(p.begin), *_cells(f, p.commits)]
            for p, f in zip(a.periods, m.periods, strict=True)
            if f.updates or f.expected or f.rejections
        ]
        lines += [f"<details><summary>{_t(m.name)} by period</summary>"]
        lines += [*_table(_columns(f"from, {FIGURES}", "from, clipped, rejections"), rows), "</details>"]
    return lines


def _bars(
    a: Audit,
    members: Sequence[Member],
    colours: Sequence[int],
    value: Value,
    wholes: Sequence[float],
    about: str,
    said: Callable[[float, float], str],
) -> list[str]:
    """Return stacked bars, one for each period. `wholes`: by period, the value that fills the height.

    `about` says what they show, to those who do not see them.
    """
    lines = [
        f'<svg class="bars" viewBox="0 0 {len(wholes)} 100" preserveAspectRatio="none" role="img" aria-label="{about}">'
    ]
    for n, (period, whole) in enumerate(zip(a.periods, wholes, strict=True)):
        top = 100.0
        for m, colour in zip(members, colours, strict=True):
            if (own := value(m.periods[n])) <= 0.0 or whole <= 0.0:
                continue
            height = 100.0 * own / whole
            top -= height
            lines.append(
                f'<rect class="c{colour}" x="{n + 0.08:.2f}" y="{top:.3f}" width="0.84" height="{height:.3f}">'
                f"<title>{_at(period.begin)}, {_t(m.name)}: {said(own, whole)}</title></rect>"
            )
    return [*lines, "</svg>"]


def _verified(a: Audit) -> list[str]:
    r = a.replay
    lines = ["<h2>What replay verified</h2>"]
    for d in r.differences:
        lines += ['<p class="bad">A commit differs from what replay computes.</p>']
        lines += ["<pre>" + "\n".join(map(_t, d.lines())) + "</pre>"]
    rows = [
        [
            f"{gap.fragment}",
            f"{gap.first} to {gap.last}",
            _t(gap.why),
            _t(f"{gap.key}: {gap.detail}" if gap.key else "–"),
        ]
        for gap in r.unverified
    ]
    but = ", but for what is said here" if r.unproven or r.unstated or r.untimely else ""
    every = f"Every commit that was read is verified{but}."
    lines += ["<p>Versions that are not verified:</p>" if rows else f"<p>{every}</p>"]
    if rows:
        lines += _table(_columns("fragment, versions, why, object", "versions, why, object"), rows)
    notes = [
        f"{r.unproven} commits depend on updates that were rejected as too long and are not in the log: the weights of "
        "their inputs are not verified." if r.unproven else "",
        f"{r.untimely} updates have more steps than the times in the log allow." if r.untimely else "",
        *(f"{_t(line)}: this snapshot is ignored." for line in r.ignored),
        *(f"{_t(line)}: whether the charter allowed these updates cannot be verified." for line in r.unstated),
    ]  # fmt: skip
    lines += [f"<p>{note}</p>" for note in notes if note]
    for made in r.outdated_together:
        lines.append(f"<p>Outdated: {_t(made)}. Such commits are valid; their writer may not have known.</p>")
        places = [[f"{one.fragment}", f"{one.first} to {one.last}", f"{one.count:,}"] for one in made.of]
        lines += ["<details><summary>These commits by fragment</summary>"]
        lines += [*_table(_columns("fragment, versions, commits", "versions"), places), "</details>"]
    return lines


def _charter(a: Audit) -> list[str]:
    note = (
        "Each version is one change, with the keys that signed and approved it. The audit checked these signatures, "
        "and that they suffice by the charter before the change; without one, the run’s owner decides alone."
    )
    lines = ["<h2>Members and charter: who agreed on what</h2>"]
    if a.memberships:
        lines.append(f'<p class="soft">{note}</p>')
    else:
        lines.append("<p>No version of the membership: the run is unsigned, or its owner has admitted nobody.</p>")
    for v in a.memberships:
        by = ", ".join(f"{_t(s.name)} <code>{_t(s.key)}</code>" for s in v.approvals)
        lines += [
            f"<h3>Version {v.version}, in force since {_at(v.at)}</h3>",
            f"<p>signed by {_t(v.signed_by.name)} <code>{_t(v.signed_by.key)}</code>"
            + (f"; proposed {_at(v.proposed_at)}, approved by {by}" if by else "")
            + f"; {v.commits:,} commits were made under it"
            + (f", the first of them {lasting(v.late_s)} before the time that it states" if v.late_s else "")
            + "</p>",
            "<pre>" + ("\n".join(map(_t, v.changes)) or "(nothing changes)") + "</pre>",
        ]  # fmt: skip
    return lines


def _manifests(a: Audit) -> list[str]:
    rows = [
        [
            _t(m.learner), f"{_at(m.since)} ({_t(m.first)})", f"{m.updates:,}",
            f"missing: {_t(m.missing)}" if m.missing else "<br>".join(map(_t, m.says)), f"<code>{_t(m.digest)}</code>",
        ]
        for m in a.manifests
    ]  # fmt: skip
    columns = _columns("learner, since (commit), updates, states, digest", "learner, since (commit), states, digest")
    note = (
        "What a learner says about its code, its data and its hardware, under its own signature. Nobody has checked "
        "that it is so. A commit is named by its fragment and version."
    )
    return ["<h2>Manifests that commits name</h2>", f'<p class="soft">{note}</p>', *_table(columns, rows)]


def _promotions(a: Audit) -> list[str]:
    rows = [
        [
            f"{p.number}", f"{p.version}", _at(p.at), _t(p.by or "–"), _t(p.series or "–"),
            (", ".join(f"{_t(by)} {value:g}" for by, value in p.values.items()) or "–")
            + "".join(f"; not on {_t(by)} {value:g}" for by, values in p.left_out.items() for value in values),
            f"does not hold: {_t(p.fault)}" if p.fault else "holds" + (", see below" if p.others else ""),
        ]
        for p in a.promotions
    ]  # fmt: skip
    columns = _columns(
        "number, version, when, by, series, on the numbers of, valid", "when, by, series, on the numbers of, valid"
    )
    note = (
        "A promotion declares one version of the model good enough to be given out. It holds if a promoter of the "
        "charter signed it, on signed numbers of as many evaluators as the charter’s gate asks for. The audit judged "
        "each again; the charter above has the gate. Other evaluators’ numbers for the version may be "
        "worse than the gate allows: the promotion does not rest on them, and they do not stop it."
    )
    lines = ["<h2>Promotions</h2>", f'<p class="soft">{note}</p>', *_table(columns, rows)]
    lines += [
        f'<p class="bad">Promotion {p.number} rests on {_t(by)}’s number {p.values[by]:g} for version {p.version}. '
        f"{_t(by)} has stored other numbers for it, too: {', '.join(map(str, values))}. Nothing proves which was "
        "first.</p>"
        for p in a.promotions
        for by, values in p.others.items()
    ]
    if a.promotions_beyond:
        numbers = ", ".join(map(str, a.promotions_beyond))
        lines.append(f"<p>Promotions {numbers} come after one that is missing, and have no effect.</p>")
    return lines + _numbers(a.numbers)


def _numbers(numbers: Sequence[Number]) -> list[str]:
    """Return all numbers that the evaluators have stored."""
    if not numbers:
        return []
    rows = [
        [
            _t(n.series), f"{n.version}", _t(n.by), f"{n.value:g}" + (" (contested)" if n.contested else ""),
            _at(n.said_at),
            ", ".join(map(str, n.promotions)) or "–", f"<code>{_t(n.key)}</code>",
        ]
        for n in numbers
    ]  # fmt: skip
    columns = _columns(
        "series, version, evaluator, number, stored (as the evaluator says), in promotions, key",
        "series, evaluator, stored (as the evaluator says), in promotions, key",
    )
    return [
        f"<details><summary>All {len(rows):,} numbers that evaluators have stored</summary>",
        "<p>Contested: the evaluator has stored different numbers for this version. None counts for a promotion from "
        "then on.</p>" if any(n.contested for n in numbers) else "",
        *_table(columns, rows), "</details>",
    ]  # fmt: skip


def _restarts(a: Audit) -> list[str]:
    rows = [
        [
            _t(r.learner),
            f"{r.incarnation}",
            _at(r.at),
            _t(r.resumed or "none: it began anew"),
            f"{r.tokens_seen:,}",
            f"{r.tokens_trained_again:,}",
        ]
        for r in a.restarts
    ]
    columns = _columns(
        "learner, incarnation, claimed, resumed from checkpoint, tokens before, trained again so far",
        "learner, claimed, resumed from checkpoint",
    )
    lines = ["<h2>Starts and restarts of learners</h2>", *_table(columns, rows), "<h2>Heals</h2>"]
    heals = [
        [f"{h.fragment}", f"{h.version}", _at(h.at), f"{h.source}", f"{h.broken_at}", _t(f"{h.key}: {h.why}")]
        for h in a.heals
    ]
    columns = _columns("fragment, version, when, starts from version, broken at version, why", "when, why")
    note = "A heal starts a fragment again from an earlier version after the store has lost or damaged an object."
    return [*lines, f'<p class="soft">{note}</p>', *_table(columns, heals)]


def _unfinished(a: Audit) -> list[str]:
    rows = [
        [
            f"{u.fragment}", f"{u.version}", _t(w.learner), f"{1 + len(others):,}", f"{w.base}",
            "–" if w.tokens is None else f"{w.tokens:,}", _at(w.stored_at), _at(w.late_at), _t(w.fault or "valid"),
            f"<code>{_t(w.key)}</code>",
        ]
        for u in a.unfinished
        for w, *others in u.by_learner
    ]  # fmt: skip
    columns = _columns(
        "fragment, for version, learner, updates, base, tokens, stored, announced late, object, key",
        "learner, stored, announced late, object, key",
    )
    note = (
        "The round after the newest commit of each fragment: updates that are stored, and that no commit up to it has "
        "merged or rejected for good. If a merge died there, these contributions were in. Commits have those of "
        "earlier rounds. A row is a learner: how many such updates it has, and the newest of them; the JSON has all."
    )
    return ["<h2>Unfinished rounds</h2>", f'<p class="soft">{note}</p>', *_table(columns, rows)]


def _influence(a: Audit) -> list[str]:
    if not a.influence:
        return ["<h2>Influence</h2>", "<p>Not computed: isthmus audit --influence MEMBER does.</p>"]
    rows = [
        [
            _t(i.name) if list(i.members) == [i.name] else f"{_t(i.name)} ({', '.join(map(_t, i.members))})",
            f"{i.rounds} of {spread(i.foldable)}" if i.rounds else f"all {spread(i.foldable)}", f"{i.left_out:,}",
            _number(i.distance), _number(i.movement), _share(i.relative), _number(i.loss), _number(i.loss_without),
            f"{i.folds:,} rounds folded, {i.seconds:.1f} s, {i.bytes_read / 1e6:.1f} MB read", _t(i.fault or "–"),
        ]
        for i in a.influence
    ]  # fmt: skip
    columns = _columns(
        "without, newest rounds, updates left out, distance, movement, distance / movement, loss recorded, loss "
        "without, cost, not computed because", "without, cost, not computed because",
    )  # fmt: skip
    note = (
        "The model folded again from the same updates, without those of one member, or of all members of one "
        "institution, in the newest rounds of each fragment. Other updates are taken as recorded, with the weights "
        "that they had, although learners would have trained otherwise. What they contributed before stays in the "
        "model and its momentum. Distance: between this model and the recorded one. Movement: between the recorded "
        "model before these rounds and after them. Losses: what the command of <code>--exec</code> measured of both "
        "models. Cost: what computing the row took, measurements included; the recorded model was measured once."
    )
    return ["<h2>Influence</h2>", f'<p class="soft">{note}</p>', *_table(columns, rows)]


def _rules(a: Audit) -> list[str]:
    rules = "\n".join(
        f"{_t(name)} = {_t(value)}"
        for kind in ("rules", "bounds")
        if isinstance(said := a.run[kind], Mapping)
        for name, value in said.items()
    )
    return [
        "<h2>Rules</h2>", f"<details><summary>Rules and bounds of the run</summary><pre>{rules}</pre></details>",
    ]  # fmt: skip


def _checked(check: Check) -> list[str]:
    lines = [
        "<h2>Check this file</h2>",
        "<p>Another audit of the same log has the same JSON, but for <code>written_at</code> and what influence cost "
        "(<code>seconds</code>, <code>bytes_read</code>): figures have nine digits.</p>",
    ]
    if check.owners:
        lines += _table(
            _columns("owner, key", "owner, key"), [[_t(name), f"<code>{_t(key)}</code>"] for name, key in check.owners]
        )
    if not check.command:
        return [*lines, "<p>This file is not signed: isthmus audit --sign KEY does.</p>"]
    return [
        *lines,
        "<p>OpenSSH checks the signature. Compare the keys in <code>allowed_signers</code> with those that you know "
        "the owners by: a report that somebody made up can name other keys. A signature says that its owner made this "
        "report. A second owner confirms it by an audit of their own, with the same figures.</p>",
        f"<pre>{_t(check.command)}</pre>",
    ]


_SECTIONS: tuple[Callable[[Audit], list[str]], ...] = (
    _institutions, _members, _work, _charts, _verified, _charter, _manifests, _promotions, _restarts, _unfinished,
    _influence, _rules,
)  # fmt: skip
