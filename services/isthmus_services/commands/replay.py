"""`isthmus replay`: fold the log again and compare, or fold it under other rules; --trace writes a timeline."""

import asyncio
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from isthmus.agent.ports import open_log
from isthmus.codecs import kernels
from isthmus.errors import InputError
from isthmus.format.rules import MergeRule, outer_for
from isthmus.inspect import export as exports
from isthmus.inspect import replay as replays
from isthmus.inspect import whatif
from isthmus.inspect.losses import LossCurves
from isthmus.inspect.replay import Difference
from isthmus.inspect.trace import trace
from isthmus.log import Log
from isthmus.log.listing import all_or
from isthmus.log.polar import require_gpu
from isthmus.wording import agreeing
from isthmus_services.commands.follow import evaluation
from isthmus_services.output.curves import losses as loss_table
from isthmus_services.output.progress import progress
from isthmus_services.output.provenance import provenance
from isthmus_services.output.report import require_free, save, stdout, write_json
from isthmus_services.output.tables import Column, fitted
from isthmus_services.settings import declared, shared

ROWS_MAX = 20
UNTIMELY_SHOWN = 10
"""Rows of the table of departures, and updates shown that had too little time. The JSON report has all rows, but of the
updates only their number."""


def run(arguments: declared.Replay) -> int:
    """Replay the log in the way that the flags say. Return 1 if a commit differs, else 0. Raises `InputError`."""
    own = shared.own_merge(arguments.merge) if arguments.merge else None
    settings = whatif.parse(arguments.set or [], own) if arguments.set or own else None
    if settings is None and (arguments.export or arguments.plot):
        raise InputError("--export and --plot need --set or --merge; to export the recorded model, use isthmus export")
    if arguments.exec is not None and (settings is None or arguments.fragment is not None):
        raise InputError("--exec compares the losses of two whole models: add --set or --merge, leave --fragment out")
    if arguments.exec is not None and not arguments.exec.split():
        raise InputError("--exec is empty: give a command")
    if settings is not None and (arguments.first != 1 or arguments.trace):
        raise InputError("--set and --merge fold from the beginning: leave --from and --trace out")
    if settings is not None and arguments.export and (arguments.fragment is not None or arguments.last is not None):
        raise InputError("--export writes the whole model at its newest versions: leave --fragment and --to out")
    if arguments.export:
        require_free(arguments.export, "--export", force=arguments.force)
    if arguments.plot:
        shared.need("matplotlib", "demo")
    kernels.warm()
    if arguments.gpu:
        require_gpu()
    return asyncio.run(_replay(arguments, settings))


async def _replay(arguments: declared.Replay, settings: whatif.Settings | None) -> int:
    async with open_log(arguments.run, shared.owner_in(arguments), threads=arguments.threads, gpu=arguments.gpu) as log:
        if arguments.trace:
            await _trace(log, arguments)
        if settings is not None:
            return await _what_if(log, arguments, settings)
        return await _compare(log, arguments)


# --- as recorded ------------------------------------------------------------------------------------------------------


async def _compare(log: Log, a: declared.Replay) -> int:
    losses = LossCurves()
    with progress("replaying") as say:
        found = await replays.replay(
            log, fragments=a.fragment, first=a.first, last=a.last, at_once=a.threads, progress=say, losses=losses
        )
    compared, stopped = sum(r.compared for r in found), [r.difference for r in found if r.difference is not None]
    different, refused = [d for d in stopped if not d.refused], [d for d in stopped if d.refused]
    for r in found:
        if r.earliest > 0 and a.first <= r.earliest:
            print(f"fragment {r.fragment}: from version {r.earliest} on; earlier versions were collected")
    for difference in stopped:
        print("\n".join([*difference.lines(), f"  → {_advice(difference, a.run)}"]))
    for replayed in found:
        for gap in replayed.gaps:
            print(gap.line(replayed.fragment))
        for outdated in replayed.outdated:
            print(f"{outdated}: such commits are valid; their writer may not have known")
        for line in replayed.nobodys:
            print(f"{line}: this snapshot is ignored")
        for line in replayed.unstated:
            print(
                f"fragment {replayed.fragment}: {line}: whether the charter allowed the updates that name this "
                "manifest cannot be verified"
            )
    untimely = [line for r in found for line in r.untimely]
    for line in untimely[:UNTIMELY_SHOWN]:
        print(f"{line}: more than the times in the log allow")
    if untimely:
        print(
            "  → compare with the learner's own log how many steps it made; a wrong clock of a syncer looks the same "
            f"(isthmus doctor {a.run} looks at the clocks)"
        )
    if len(untimely) > UNTIMELY_SHOWN:
        print(f"and {len(untimely) - UNTIMELY_SHOWN} more such updates")
    if unproven := sum(r.unproven for r in found):
        print(
            f"{unproven} {agreeing(unproven, 'commit depends', 'commits depend')} on updates that were rejected as "
            "too long and are not in the log: the weights of their inputs are not verified"
        )
    if curves := losses.points():
        console = stdout()
        console.print(loss_table(curves, console.width))
    unverifiable = sum(gap.last - gap.first + 1 for replayed in found for gap in replayed.gaps)
    healed = f", {unverifiable} cannot be verified (healed)" if unverifiable else ""
    unreached = sum(r.unreached for r in found)
    after = f", {unreached} after these were not compared" if unreached else ""
    unread = f", {len(refused)} not readable (rights)" if refused else ""
    late = sum(one.count for replayed in found for one in replayed.outdated)
    under = f", {late} were made under a replaced membership" if late else ""
    weights = f", {unproven} have weights that are not verified" if unproven else ""
    count, differ = compared + len(stopped), agreeing(len(different), "differs", "differ")
    read = f"{count} {agreeing(count, 'commit', 'commits')}"
    print(f"{read}, {len(different)} {differ}{unread}{healed}{after}{under}{weights}")
    write_json(
        {
            "commits": compared + len(stopped),
            "differ": len(different),
            "not_readable": len(refused),
            "unverifiable": unverifiable,
            "unreached": unreached,
            "unproven": unproven,
            "untimely": len(untimely),
            "losses": {name: [list(point) for point in points] for name, points in losses.points().items()},
            "fragments": [
                {
                    "fragment": r.fragment,
                    "start": r.start,
                    "earliest": r.earliest,
                    "compared": r.compared,
                    "nobodys": r.nobodys,
                    "unstated": r.unstated,
                    "outdated": [asdict(one) for one in r.outdated],
                    "gaps": [{"first": g.first, "last": g.last, "key": g.key, "detail": g.detail} for g in r.gaps],
                }
                for r in found
            ],
            "differences": [
                {
                    "fragment": d.fragment,
                    "version": d.version,
                    "key": d.key,
                    "detail": d.detail,
                    "refused": d.refused,
                    "inputs": list(d.inputs),
                    "tensors": [
                        {"name": t.name, "different": t.different, "elements": t.elements, "largest": t.largest}
                        for t in d.tensors
                    ],
                }
                for d in stopped
            ],
        },
        a.json,
    )
    return 1 if stopped else 0


def _advice(found: Difference, run: str) -> str:
    """Return what to do about a version that is not verified."""
    if found.refused:
        return (
            "nothing is known to be damaged: give this user the right to read it (in a folder the message names the "
            f"command), or replay with a reader's credentials; isthmus doctor {run} --role reader names missing rights"
        )
    if found.damaged:
        alone = f"isthmus replay {run} --fragment {found.fragment} --from {found.goes_on}"
        rest = f"{alone} compares those after the next snapshot" if found.goes_on else ""
        what = (
            f"restore it from a backup. isthmus heal {run} --fragment {found.fragment} says whether the run needs it; "
            "if the fragment is sound or has a hole, it does not, and without a backup these versions are not verified "
            "any more"
        )
        return "; ".join(filter(None, [what, rest]))
    again = f"isthmus replay {run} --fragment {found.fragment} --from {found.version} --to {found.version}"
    return (
        f"compare on a second machine: {again}. If it differs there, too, the syncer that wrote the version merged "
        f"something else: isthmus explain {run} {found.fragment}/{found.version} names it. End it and have its machine "
        "checked; in a signed run the owner can expel it"
    )


async def _trace(log: Log, a: declared.Replay) -> None:
    headers = []
    for p in all_or(log, a.fragment):
        async for commit in log.commits(p, a.first - 1):
            if a.last is not None and commit.version > a.last:
                break
            headers.append(commit.header)
    write_json(trace(headers), a.trace)
    print(f"timeline of {len(headers)} commits in {a.trace}: open it in https://ui.perfetto.dev")


# --- under other rules ------------------------------------------------------------------------------------------------


EVALUATE = f"{shlex.quote(sys.executable)} -m isthmus.demo.evaluate"
"""Prints the held-out loss of a model of `isthmus demo`."""


async def _what_if(log: Log, a: declared.Replay, settings: whatif.Settings) -> int:
    with progress("folding") as say:
        outcome = await whatif.what_if(
            log, settings, fragments=a.fragment, last=a.last, at_once=a.threads, progress=say
        )
    said = ", ".join([*([f"merge={a.merge}"] if a.merge else []), *(a.set or [])])
    rows = [
        (
            str(row.version),
            str(row.inputs_other),
            str(row.inputs_recorded),
            f"{row.difference:.4g}",
            f"{row.relative:.2%}",
            f"{row.cosine:.5f}",
        )
        for row in _some(outcome.rows)
    ]
    names = ("version", "updates in", "as recorded", "difference", "relative", "cosine")
    console = stdout()
    console.print(fitted(f"{a.run} with {said}", [Column(n, i) for i, n in enumerate(names)], rows, console.width))
    if any(outcome.starts):
        print(f"from versions {outcome.starts} on; earlier versions were collected")
    print(
        "relative: the difference as a share of how far the recorded run had moved from its start; it says how far "
        "apart the two models are, not which one is better\n"
        "updates are taken as recorded, from their original bases: under these rules, learners would have "
        "trained differently"
    )
    values = [outcome.states[p].published for p in sorted(outcome.states)]
    early = max(1, max(outcome.heads, default=0) // 4)
    losses: tuple[float | None, float | None] = None, None
    if a.exec:
        evaluate = evaluation(log, shlex.split(a.exec))
        losses = (
            await evaluate(await exports.published(log, outcome.heads), outcome.heads),
            await evaluate(values, outcome.heads),
        )
        at = "the last versions" if a.last is None else f"version {a.last}"
        print(_losses(*losses, said, at))
        if a.last is None:
            print(
                "at the last versions this says little: the updates were made for the recorded model, from which the "
                f"other one has drifted; compare at an early version: --to {early}"
            )
    elif a.fragment is None:
        last = early if a.last is None else a.last
        words = ["isthmus", "replay", a.run, *(word for pair in a.set or () for word in ("--set", pair))]
        words += (["--merge", a.merge] if a.merge else []) + ["--to", str(last)]
        print(
            f"for the held-out losses of both models at version {last}: {shlex.join([*words, '--exec', EVALUATE])}\n"
            "(for another model than the demo's, give a command that prints the loss of the model in $ISTHMUS_CUT_DIR)"
        )
    made_by = provenance("isthmus.inspect.whatif", a.threads, [a.merge]) if a.merge else None
    if made_by:
        rate, momentum = outer_for(MergeRule.RDA, log.run.rules.sync_every)
        labs = {f"outer.lr={rate:g}", f"outer.momentum={momentum:g}"}
        print("the function merges in place of all rules, ", end="")
        if labs <= set(a.set or ()):
            print("at RDA's outer rate and momentum, as in the lab")
        else:
            print(
                "at the recorded outer rate and momentum unless --set changes them; the lab gives it those of RDA, and "
                "another outer step can reverse which rule is better: for the lab's, add "
                + " ".join(f"--set {pair}" for pair in sorted(labs))
            )
        print(made_by.line)
    if a.plot:
        _plot(Path(a.plot), outcome.rows, said)
        print(f"picture {a.plot}")
    if a.export:
        exports.write(Path(a.export), log.run, values, outcome.heads)
        print(f"weights {a.export}")
    write_json(
        {
            "set": list(a.set or []),
            "merge": a.merge,
            "reproducible_on": asdict(made_by) if made_by else None,
            "starts": outcome.starts,
            "heads": outcome.heads,
            "loss": losses[0],
            "loss_other": losses[1],
            "rows": [
                {
                    "version": r.version,
                    "inputs_recorded": r.inputs_recorded,
                    "inputs_other": r.inputs_other,
                    "difference": r.difference,
                    "way": r.way,
                    "relative": r.relative,
                    "cosine": None if math.isnan(r.cosine) else r.cosine,
                }
                for r in outcome.rows
            ],
        },
        a.json,
    )
    return 1 if a.exec and None in losses else 0


def _losses(recorded: float | None, other: float | None, said: str, at: str) -> str:
    """Return the two held-out losses at a version as text; None: the command printed none."""
    if recorded is None or other is None:
        return "held-out losses: not known, since the command's last word was no number, or it failed"
    more = f"{other - recorded:+.4f}"
    return f"held-out loss at {at}: {recorded:.4f} as recorded, {other:.4f} with {said} ({more})"


def _some(rows: list[whatif.Departure]) -> list[whatif.Departure]:
    """Return at most `ROWS_MAX` rows, evenly spread, with the first and the last."""
    if len(rows) <= ROWS_MAX:
        return rows
    chosen = sorted({round(i * (len(rows) - 1) / (ROWS_MAX - 1)) for i in range(ROWS_MAX)})
    return [rows[i] for i in chosen]


def _plot(path: Path, rows: list[whatif.Departure], said: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    versions = [row.version for row in rows]
    upper.plot(versions, [row.difference for row in rows], color="tab:orange", label="difference between the two")
    upper.plot(
        versions,
        [row.way for row in rows],
        color="tab:gray",
        linestyle="--",
        label="distance of the recorded run from its start",
    )
    upper.set_ylabel("norm of the published values")
    upper.legend()
    upper.set_title(f"what if {said}")
    lower.plot(versions, [row.cosine for row in rows], color="tab:blue")
    lower.set_ylabel("cosine between the two")
    lower.set_xlabel("version")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    save(figure, path)
    pyplot.close(figure)
