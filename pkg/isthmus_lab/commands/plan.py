"""`isthmus plan`: the settings to choose for a model and a set of learners, with a forecast and the cost.

With `--compare`, the plan is compared with data parallel training in one place and across the links."""

import bisect
import functools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from isthmus.bus import IN_STORE
from isthmus.errors import InputError
from isthmus.format.layout import Spec
from isthmus.format.rules import CHECKPOINT_S, MergeRule, Rules
from isthmus.learner.incarnation import RARER_MAX
from isthmus_lab.commands import rates, settings_classes
from isthmus_lab.commands.plan_given import islands_of, measure, params_of, speeds_of
from isthmus_lab.forecast import learning, matrices
from isthmus_lab.forecast.compare import (
    ACROSS,
    ALONE,
    ASSUMED,
    DECOUPLED,
    ONE_PLACE,
    Comparison,
    Way,
    compare,
)
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.learning import RESTS_ON, SHORT, lab
from isthmus_lab.forecast.outcome import (
    CHECKPOINT_SHARE,
    COPY_BYTES_S,
    HEADROOM,
    SYNCER_CORES,
    SYNCER_GBIT_S,
    Forecast,
    copied,
)
from isthmus_lab.forecast.planner import NO_PARTNER, Plan, plan, trained_again
from isthmus_lab.forecast.polling import BEAT_MAX_S, BusCosts, bus_costs, costs_within
from isthmus_lab.forecast.quality import LOSSLESS, USUAL
from isthmus_lab.forecast.search import PERIODS, Fixed
from isthmus_services.board.prices import Prices
from isthmus_services.output.report import stdout, write_json
from isthmus_services.settings import shared
from isthmus_services.settings.prices import prices_of
from isthmus_services.settings.tables import read_table

STEP_TOKENS = 1e6

FASTEST_TFLOP_S = 1000.0
"""TFLOP/s of a GPU in training above which a step time is called impossible."""

USUAL_TFLOP_S = 400.0
"""TFLOP/s of a GPU in training for which that warning gives the step time."""

WELL_AHEAD = 1.05
"""Times as much as data parallel across the links below which a plan says that data parallel does as well."""

EGRESS = "egress_gb", "egress_sent_gb", "egress_usd", "checkpoints_egress_usd"

DEAR = 0.02
"""Share of a day's dollars from which on the egress of checkpoints is named."""

RARER = 10
"""The plan also names the price of checkpoints that are so many times as rare."""
NO_EGRESS = "egress is not known without regions (region and store_region in a file, --islands)"
"""Said where no learner has a region."""

COLUMNS = 100
"""Columns of the output, if it goes into a file or a pipe."""

TURNS = ("mtbf_hours", "mtbf_hours_at_parity", "gbit_s", "gbit_s_at_parity")
"""Fields of a comparison at which decoupled training stops paying."""


def run(arguments: settings_classes.Plan) -> int:
    """Print the plan, or with `--compare` the comparison; return the exit status.

    With `--measure`, plan nothing and write this machine's speeds to a file.
    """
    if arguments.measure:
        return measure(Path(arguments.measure))
    shared.require_iso_for_blocks(arguments.merge, arguments.iso_block)
    file = read_table(arguments.islands) if arguments.islands else {}
    assumed: list[str] = []
    params, specs = params_of(arguments, file)
    islands = islands_of(arguments, file, assumed)
    prices = prices_of(arguments.prices, arguments.gpu_hour, assumed)
    fixed = Fixed(
        fragments=arguments.fragments,
        sync_every=arguments.sync_every,
        merge=arguments.merge,
        iso_block=arguments.iso_block,
        codec=arguments.codec,
        codec_down=arguments.codec_down,
    )
    table, named = speeds_of(arguments)
    region = str(file.get("store_region", ""))
    planned = functools.partial(plan, params, islands, prices, store_region=region, speeds=table.of, specs=specs)
    found = planned(fixed=fixed)
    of_objects = _of_objects(found)
    bus = _bus(
        arguments.requests_per_hour, found, islands, prices, lambda h: planned(fixed=replace(fixed, sync_every=h))
    )
    if arguments.requests_per_hour:
        found = _with_messages(found, bus)
    tokens = STEP_TOKENS if arguments.step_tokens is None else arguments.step_tokens
    if arguments.compare:
        too_fast = [said for island in islands if (said := _too_fast(island, params, tokens))]
        found = replace(found, warnings=[*found.warnings, *too_fast])
    line = init_line(found, arguments.model, bus if arguments.requests_per_hour else None)
    in_store = msgspec.to_builtins(bus)
    report = plain(found) | {"init": line, "bus_in_store": in_store, "speeds": {"named": named, "how": table.how}}
    console = stdout(COLUMNS)
    for island in islands:
        console.print(_links(island), highlight=False)
        if arguments.compare:
            console.print(_compute(island, params, tokens), highlight=False)
    if overloaded := [f.island.name for f in found.forecasts if max(f.up_load, f.down_load) > 1.0]:
        for warning in found.warnings:
            console.print(f"warning: {warning}", style="yellow", highlight=False)
        given = "with the settings that you gave" if fixed != Fixed() else "at any settings that are tried"
        console.print(f"there is no plan: the links of {', '.join(overloaded)} cannot carry this model {given}")
        write_json(_finite(report | {"init": None, "assumed": assumed}), arguments.json)
        return 1
    if arguments.compare:
        if arguments.step_tokens is None:
            assumed.append(f"{STEP_TOKENS:g} tokens in a learner's step (--step-tokens)")
        beside = compare(found, islands, prices, tokens)
        _show_compared(found, beside, islands, arguments.islands is not None, details=arguments.details)
        turns = {name: _turn(getattr(beside, name)) for name in TURNS}
        report["compare"] = msgspec.to_builtins(beside) | turns | {"assumed": ASSUMED}
    else:
        _show(found, details=arguments.details)
        if sum(island.count for island in islands) > 1:
            beside = compare(found, islands, prices, tokens)
            report["times_data_parallel_across_links"] = _times(beside)
            console.print(_beside_data_parallel(beside), highlight=False)
    if not arguments.compare or arguments.requests_per_hour is not None:
        console.print(_priced(bus, of_objects, counted=arguments.requests_per_hour is not None), highlight=False)
    for warning in found.warnings:
        if not (arguments.compare and warning == NO_PARTNER):  # the comparison has said it
            console.print(f"warning: {warning}", style="yellow", highlight=False)
    if not arguments.compare:
        console.print(f"syncer arithmetic: {named}: {table.how}", highlight=False)
    console.print(f"the plan rests on: {'; '.join(_rests_on(found, islands, specs, prices))}", highlight=False)
    if assumed:
        console.print(f"assumed, because not given: {'; '.join(assumed)}", highlight=False)
    if any(island.gpus > 1 for island in islands):
        console.print(
            "note: the forecast lets the GPUs of a learner share its step "
            "without loss; the memory of a learner is that of its first rank's host (docs/your-loop.md)",
            highlight=False,
        )
    if (seconds := found.checkpoint_s) != CHECKPOINT_S and found.day["checkpoints_gb"]:
        console.print(_checkpoints(seconds), highlight=False)
    if arguments.compare and (dear := _dear_checkpoints(found, "the egress")):
        console.print(dear, highlight=False)
    console.print("to create this run:", highlight=False)
    console.print(line, highlight=False, soft_wrap=True)
    unknown = [] if any(island.region for island in islands) else [f"{NO_EGRESS}: counted as 0"]
    write_json(_finite(report | {"assumed": assumed + unknown}), arguments.json)
    return 0


def _bus(
    bound: float | None, found: Plan, islands: Sequence[Island], prices: Prices, with_period: Callable[[int], Plan]
) -> BusCosts:
    """Return what a bus in the store would cost. Raises `InputError` if no heartbeat keeps within the bound.

    `bound`: most requests of a learner in an hour; None: any number. `with_period`: plans with a period that is given.
    """
    step_s = min(island.step_s for island in islands)
    learners = sum(island.count for island in islands)
    if bound is None:
        return bus_costs(_asked(found), learners, step_s, prices)

    def within(of: Plan) -> BusCosts | None:
        return costs_within(_asked(of), learners, step_s, prices, bound, _of_objects(of))

    if (costs := within(found)) is not None:
        return costs
    longer = [period for period in PERIODS if period > found.period]
    enough = bisect.bisect_left(longer, True, key=lambda period: within(with_period(period)) is not None)
    period = f"--sync-every {longer[enough]} will do" if enough < len(longer) else "--sync-every"
    of_objects = _of_objects(found)
    least = of_objects + sum(bus_costs(_asked(found), learners, step_s, prices, BEAT_MAX_S).learner.values())
    raise InputError(
        f"--requests-per-hour {bound:g}: with H = {found.period}, a learner makes {of_objects:,.0f} "
        f"requests an hour for updates, versions and checkpoints, and {least:,.0f} with messages, at a heartbeat "
        f"of {BEAT_MAX_S:g} s: allow at least so many, or give a longer period ({period}) or fewer --fragments"
    )


def _asked(found: Plan) -> Rules:
    """Return the rules as if the run's period had been asked for."""
    return msgspec.structs.replace(found.rules, sync_every=found.period)


def _with_messages(found: Plan, bus: BusCosts) -> Plan:
    """Return the plan with the requests and dollars of a bus in the store counted in."""
    forecasts = [replace(f, requests_day=_with_more(f.requests_day, bus.learner)) for f in found.forecasts]
    learners = sum(f.island.count for f in forecasts)
    reads = learners * bus.learner["get"] + bus.syncer["get"]
    writes = learners * sum(bus.learner.values()) + sum(bus.syncer.values()) - reads
    more = {"reads": reads, "writes": writes, "requests_usd": bus.usd_hour, "usd": bus.usd_hour}
    day = _with_more(found.day, more)
    per_usd = found.per_usd * found.day["usd"] / day["usd"] if found.day["gpu_usd"] else found.per_usd
    return replace(found, forecasts=forecasts, day=day, per_usd=per_usd)


def _with_more(day: dict[str, float], hour: Mapping[str, float]) -> dict[str, float]:
    """Return figures of a day, with those of an hour counted in."""
    return day | {name: day.get(name, 0.0) + 24.0 * of_hour for name, of_hour in hour.items()}


def _of_objects(found: Plan) -> float:
    """Return the requests an hour of the busiest learner for updates, versions and checkpoints."""
    return max(sum(f.requests_day.values()) for f in found.forecasts) / 24.0


def _priced(bus: BusCosts, of_objects: float, *, counted: bool) -> str:
    """Return what a bus in the store costs, in one line. `counted`: whether the day's requests include its own."""
    learner, syncer = (sum(of.values()) for of in (bus.learner, bus.syncer))
    which, more = ("counted above", "") if counted else ("not counted above", "more ")
    return (
        f"without a server for messages (--bus store:, {which}): heartbeat {bus.beat_s:g} s; {learner:,.0f} {more}"
        f"requests an hour of a learner ({learner + of_objects:,.0f} in all) and {syncer:,.0f} of the syncer, "
        f"${bus.usd_hour:.3f} an hour in all; a message is read after at most {bus.heard_s[0]:g} s while an answer is "
        f"due, else {bus.heard_s[1]:g} s"
    )


def init_line(found: Plan, model: str | None = None, bus: BusCosts | None = None) -> str:
    """Return the command that creates a run with the settings of the plan; `bus`: for this bus in the store."""
    rules, pace = found.rules, found.pace
    words = ["isthmus", "init", "s3://BUCKET/RUN", "--model", model or "PACKAGE.MODULE:FUNCTION"]
    words += ["--fragments", str(rules.fragments), "--sync-every", str(rules.sync_every)]
    words += ["--merge", rules.merge]
    if rules.merge == MergeRule.ISO and rules.iso_block:
        words += ["--iso-block", str(rules.iso_block)]
    if rules.isotropic_up:
        words += ["--isotropic-up"]
    words += ["--codec", rules.codec_up, "--codec-down", rules.codec_down]
    words += ["--outer-lr", f"{rules.outer_lr:g}", "--outer-momentum", f"{rules.outer_momentum:g}"]
    words += ["--overlap", f"{pace.overlap:g}", "--quorum", str(pace.quorum)]
    if bus is not None:
        words += ["--bus", IN_STORE, "--heartbeat", f"{bus.beat_s:g}", "--silence", f"{3.0 * bus.beat_s:g}"]
    return shlex.join(words)


def _finite(value: Any) -> Any:
    """Return the value with None in place of every float in it that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _turn(found: float | None) -> float | str:
    """Return where decoupled training stops paying, or whether it does never or always."""
    return "never" if found is None else "always" if math.isinf(found) else found


def plain(found: Plan) -> dict[str, Any]:
    """Return the plan as plain data for a report. An infinite `mtbf_hours` becomes None, and so does egress without
    regions, of which nothing is known."""
    report = msgspec.to_builtins(found)
    if not any(f.island.region for f in found.forecasts):
        report["day"] |= dict.fromkeys(EGRESS)
    for forecast, of in zip(report["forecasts"], found.forecasts, strict=True):
        forecast["island"]["mtbf_hours"] = None if of.island.mtbf_hours == float("inf") else of.island.mtbf_hours
    report["warnings"] = found.warnings
    return report  # type: ignore[no-any-return]


def _links(island: Island) -> str:
    """Return the links of a learner as they were understood."""
    return (
        f"links of {_who(island)}: {rates.shown(island.up_gbit_s)} up, {rates.shown(island.down_gbit_s)} down, "
        f"{island.latency_s:g} s one way to the store"
    )


def _tflop_s(island: Island, params: float, tokens: float) -> float:
    """Return the TFLOP/s of each GPU that the step time of a learner implies. `tokens`: in one step of one learner."""
    return 6.0 * params * tokens / island.step_s / island.gpus / 1e12


def _compute(island: Island, params: float, tokens: float) -> str:
    """Return the step time of a learner with the speed of its GPUs that it implies."""
    return (
        f"compute of {_who(island)}: {island.step_s:g} s for a step of {tokens:g} tokens, that is "
        f"{_tflop_s(island, params, tokens):,.4g} TFLOP/s of each of its GPUs "
        f"({island.gpus:,}; 6 · parameters · tokens / seconds / GPUs)"
    )


def _too_fast(island: Island, params: float, tokens: float) -> str:
    """Return a warning if the step time implies GPUs faster than any present one; else nothing."""
    if (implied := _tflop_s(island, params, tokens)) <= FASTEST_TFLOP_S:
        return ""
    usual_s = island.step_s * implied / USUAL_TFLOP_S
    return (
        f"{island.name}: the step time implies {implied:,.4g} TFLOP/s of each GPU; no present GPU is so fast, and the "
        f"comparison does not hold for real ones: at {USUAL_TFLOP_S:g} TFLOP/s of each GPU a step takes "
        f"{usual_s:.3g} s; give --step-seconds {usual_s:.3g} (step_s in a file), more GPUs, or fewer --step-tokens"
    )


def _columns(title: str, names: Sequence[str]) -> Table:
    """Return a table with these columns. A cell that does not fit is folded, never cut."""
    table = Table(title=title, title_justify="left")
    for n, name in enumerate(names):
        table.add_column(name, justify="right" if n else "left", overflow="fold")
    return table


def _show(found: Plan, *, details: bool) -> None:
    console = stdout(COLUMNS)
    chosen = Table(title=f"settings for {found.params:.3g} parameters", title_justify="left")
    for name in ("setting", "value", "because"):
        chosen.add_column(name, overflow="fold")
    for choice in found.choices:
        chosen.add_row(choice.name, str(choice.value), choice.reason if details else choice.brief or choice.reason)
    console.print(chosen)
    if not details and any(choice.brief for choice in found.choices):
        console.print("--details has the ties of merge and codec, and how their costs were measured", highlight=False)
    for table in _forecasts(found):
        console.print(table)
    for f in found.forecasts:
        console.print(_restart(f), highlight=False)
    s, day = found.syncer, found.day
    beside = float(copied(found.params, found.period))
    console.print(
        "utilisation: the share of its time in which a healthy learner computes; beside each step "
        f"{beside / 1e6:,.0f} MB are copied out of the model and into it ({beside / COPY_BYTES_S:.2g} s at "
        f"{COPY_BYTES_S / 1e9:g} GB/s), less with a longer period; goodput: utilisation, less what failures take; "
        "tokens merged: the share of processed tokens that commits hold, the rest is overwritten by incoming versions",
        highlight=False,
    )
    for line in _worth(found):
        console.print(line, highlight=False)
    console.print(
        f"syncer: {s['memory_gib']:.1f} GiB, {s['cores']:.2f} cores on average ({s['merge_s']:.2f} s of one core for a "
        f"round of one fragment, {s['rounds_day']:,.0f} rounds a day), "
        f"{s['down_gbit_s']:.2f} Gbit/s in, {s['up_gbit_s']:.2f} Gbit/s out; several syncers share this load",
        highlight=False,
    )
    console.print(
        f"a syncer that takes over all fragments first reads at most {s['takeover_gb']:,.1f} GB: "
        f"{s['takeover_s']:,.0f} s at {SYNCER_GBIT_S:g} Gbit/s with {SYNCER_CORES:g} cores",
        highlight=False,
    )
    restarts = f" ({day['restarts_gb']:,.0f} of it by restarts)" if day["restarts_gb"] else ""
    known = any(f.island.region for f in found.forecasts)
    sent_gb = day["egress_sent_gb"]
    across = f"{sent_gb:,.0f} GB sent and {day['egress_gb'] - sent_gb:,.0f} GB received between regions"
    egress = (
        f"${day['egress_usd']:,.2f} for {across}" if known else "not known, since no learner has a region (--islands)"
    )
    priced = f", {found.per_usd:.4g} per dollar" if day["gpu_usd"] else ""
    console.print(
        f"all learners together learn as much in a second as {found.learnt:.4g} of their steps do in data parallel"
        f"{priced}; of all settings that are tried (H up to {PERIODS[-1]}) and that the links can carry, the plan "
        "chooses those that learn most; figures that differ by less than the forecast's error of "
        f"{learning.error():.0%} are ties (the reasons name the rule); what is extrapolated may err by more, by an "
        "unknown amount",
        highlight=False,
    )
    console.print(
        f"a day: {day['up_gb']:,.0f} GB up ({day['checkpoints_gb']:,.0f} of it checkpoints), {day['down_gb']:,.0f} GB "
        f"down{restarts}, {day['writes']:,.0f} writes, "
        f"{day['reads']:,.0f} reads, {day['stored_gb']:,.0f} GB stored: ${day['usd']:,.2f} "
        f"(GPUs ${day['gpu_usd']:,.2f}, requests ${day['requests_usd']:,.2f}, egress {egress}, "
        f"storage ${day['storage_usd']:,.2f}, syncer ${day['syncer_usd']:,.2f})",
        highlight=False,
    )
    if dear := _dear_checkpoints(found, "that"):
        console.print(dear, highlight=False)


def _dear_checkpoints(found: Plan, of: str) -> str:
    """Return what checkpoints cost that leave their region, if it is much of a day's dollars; else nothing. `of`: the
    sum that has it, in words."""
    usd, rarer = found.day["checkpoints_egress_usd"], RARER * found.checkpoint_s
    if usd <= DEAR * found.day["usd"]:
        return ""
    return (
        f"${usd:,.2f} of {of} are for checkpoints that leave their region, one every {found.checkpoint_s:,.0f} s: with "
        f"--checkpoint {rarer:.0f} at these learners it is ${usd / RARER:,.2f}, and after a failure the optimizer's "
        "moments and the place in the data are so much older"
    )


def _checkpoints(seconds: float) -> str:
    """Return how a learner takes checkpoints as rarely as planned, and what it does by default."""
    least = RARER_MAX * CHECKPOINT_S
    default = f"the default of {CHECKPOINT_S:g} s comes to the same on this uplink"
    if seconds > least:
        default = (
            f"by default it takes one a minute where its uplink carries that, and one at least every {least:g} s, "
            "which loads its uplink more than planned"
        )
    return f"pass each learner --checkpoint {seconds:.0f} (checkpoint_s={seconds:.0f} of isthmus.join): {default}"


def _times(beside: Comparison) -> float:
    """Return how many times as much the plan learns a day as data parallel across its links."""
    return beside.way(DECOUPLED).learnt / beside.way(ACROSS).learnt


def _times_more(one: Way, than: Way) -> str:
    return f"{one.learnt / than.learnt:.3g} times" if than.learnt else "infinitely many times"


def _beside_data_parallel(beside: Comparison) -> str:
    """Return how the plan compares with data parallel across the same links, and with one learner, in a sentence."""
    times, ours, alone = _times(beside), beside.way(DECOUPLED), beside.way(ALONE)
    if ours.learnt <= alone.learnt:
        return (
            f"it does not pay over these links: one learner alone learns {_times_more(alone, ours)} as much a day as "
            f"the plan; at parity the plan would learn {beside.most / alone.learnt:.3g} times as much as one learner "
            "(--compare says more)"
        )
    if times < WELL_AHEAD:
        return (
            f"data parallel across these links does as well or better: the plan learns {times:.2f} times as much a day "
            "(--compare says more)"
        )
    return (
        f"beside data parallel across these links, the plan learns {times:.3g} times as much a day; "
        f"{_pays_links(beside)} (--compare says more)"
    )


def _rests_on(found: Plan, islands: Sequence[Island], specs: Sequence[Spec] | None, prices: Prices) -> list[str]:
    """Return what the figures rest on beside the arguments."""
    width = matrices.typical(found.params).shapes[0][0]
    shape = f"matrices of a typical transformer, {width:,} wide, and equal fragments (--model reads the real ones)"
    parts = [
        *([shape] if specs is None else []),
        f"fragments take at most {HEADROOM:.0%} of a link, checkpoints {CHECKPOINT_SHARE:.0%} of an uplink; the rest "
        "is free",
        "the tokens merged are of a run whose period is at rest, within 8 points of the lab's agents (docs/paper.md); "
        "they count the time of the merge itself, which takes none in the lab's runs",
    ]
    if not any(island.region for island in islands):
        most = sum(f.down_gb_day * f.island.count for f in found.forecasts) * prices.egress_gb
        parts.append(f"{NO_EGRESS}: counted as 0; ${most:,.0f} a day if all learners are outside the store's region")
    return parts


def _restart(f: Forecast) -> str:
    """Return how long a learner of this kind is away after a failure, and what this time consists of."""
    what = f"{f.read_gb:.3g} GB at {f.island.down_gbit_s:g} Gbit/s, checkpoint and newest version"
    return (
        f"{f.island.name}: a restart takes {f.restart_s:,.0f} s: {f.island.restart_s:,.0f} s to start, "
        f"{f.read_s:,.0f} s to read {what}"
    )


def _worth(found: Plan) -> list[str]:
    """Return lines on what a token is worth, and on where this was not measured."""
    worth = found.worth
    if worth.longest == SHORT:
        return []
    measured = [lab(merge).longest for merge in (MergeRule.ISO, MergeRule.RDA)]
    longest = [worth.longest] if worth.longest in measured else measured
    fewer = not {found.rules.codec_up, found.rules.codec_down} <= {*LOSSLESS, USUAL}
    lines = [
        f"a processed token is worth {worth.long:.2f} of data parallel's: by {RESTS_ON}, in its longest runs "
        f"({' to '.join(f'{n:,}' for n in longest)} steps); {worth.short:.2f} in its runs of {SHORT} steps; 1 (parity) "
        f"was published at large scale{', with int4 and more bits alone' if fewer else ''}"
    ]
    if worth.beyond:
        lines.append(f"this is extrapolated: {'; '.join(worth.beyond)}")
    return lines


def _who(island: Island) -> str:
    return f"{island.count} × {island.name}" if island.count > 1 else island.name


def _forecasts(found: Plan) -> list[Table]:
    """Return two tables of the learners: how their time is used, and the traffic on their links."""
    time = _columns("what to expect", ("learner", "utilisation", "goodput", "tokens merged", "memory of one"))
    links = _columns(
        "over its links (shares are without restarts, bytes and requests are of a day without pauses)",
        ("learner", "up", "down", "round trip", "GB a day, up + down", "requests a day"),
    )
    for f in found.forecasts:
        time.add_row(
            _who(f.island),
            f"{f.utilization:.1%}",
            f"{f.goodput:.1%}",
            f"{f.kept:.0%}",
            f"{f.memory_gib:.1f} GiB",
        )
        links.add_row(
            _who(f.island),
            f"{f.up_load:.0%}",
            f"{f.down_load:.0%}",
            f"{f.back_s:.1f} s",
            f"{f.up_gb_day:,.0f} + {f.down_gb_day:,.0f}",
            f"{sum(f.requests_day.values()):,.0f}",
        )
    return [time, links]


RING_SAID = 1.02
"""A ring is said beside a direct exchange if its steps are so many times as long."""

AGAIN_SAID = 0.01
"""Share of steps that are trained again from which on a comparison says what it would be without them."""


def _verdict(found: Plan, beside: Comparison) -> str:
    """Return what the comparison says, in one line."""
    ours, one, across, alone = (beside.way(name) for name in (DECOUPLED, ONE_PLACE, ACROSS, ALONE))
    error = learning.error()

    def said(ratio: float) -> str:
        tie = abs(ratio - 1.0) <= error
        return f"a tie within the forecast's error of {error:.0%}" if tie else "more" if ratio > 1.0 else "less"

    place, times = ours.learnt / one.learnt, ours.learnt / across.learnt if across.learnt else math.inf
    beside_one = (
        f"{ours.learnt / alone.learnt:.3g} times one island alone" if alone.learnt else "all of one island alone"
    )
    usd = f", for {ours.usd / alone.usd:.3g} times the dollars" if alone.usd else ""
    return (
        f"verdict: decoupled learns {place:.0%} of one place ({said(place)}; {beside.least / one.learnt:.0%} in short "
        f"runs, {beside.most / one.learnt:.0%} at parity), {times:.3g} times data parallel across the links "
        f"({said(times)}), and at most {beside_one}{usd}"
    )


def _show_compared(
    found: Plan, beside: Comparison, islands: Sequence[Island], from_file: bool, *, details: bool
) -> None:
    console = stdout(COLUMNS)
    gpus, learners = sum(i.gpus * i.count for i in islands), sum(i.count for i in islands)
    table = _columns(
        f"a day of {gpus:,} GPUs in {learners} learner{'s' if learners > 1 else ''}, {found.params:.3g} parameters",
        ("", "data parallel,\none place", "data parallel,\nacross the links", "one island\nalone", "decoupled"),
    )
    one = beside.way(ONE_PLACE)
    ways = beside.ways
    steps = [f"{w.step_s:.3g} s" for w in ways]
    if (slowest := max(i.step_s for i in islands)) > ways[-1].step_s:
        steps[-1] += f" to {slowest:.3g} s"
    table.add_row("a step", *steps)
    table.add_row("goodput", *(f"{w.goodput:.1%}" for w in ways))
    table.add_row("tokens processed", *(f"{w.processed:.3g}" for w in ways))
    table.add_row("worth of a token", *(f"{w.worth:.2f}" for w in ways))
    table.add_row("tokens learnt", *(f"{w.learnt:.3g}" for w in ways))
    table.add_row("relative to one place", *(f"{w.learnt / one.learnt:.0%}" for w in ways))
    table.add_row("dollars", *(f"{w.usd:,.0f}" for w in ways))
    table.add_row("learnt per dollar", *(f"{w.per_usd:.3g}" if w.usd else "free" for w in ways))

    def say(words: str) -> None:
        console.print(words, highlight=False)

    if learners > 1:
        say(_verdict(found, beside))
    console.print(table)
    ours, rules = beside.way(DECOUPLED), found.rules
    if learners > 1:
        say(f"compared with one place, which must have {gpus:,} GPUs: {_pays_place(found, beside)}")
        times = ours.learnt / beside.way(ACROSS).learnt
        say(f"compared with data parallel across the links ({times:.3g} times it): {_pays_links(beside)}")
        if beside.ring_step_s > RING_SAID * beside.way(ACROSS).step_s:
            across_s = beside.way(ACROSS).step_s
            say(
                f"in a ring, {2 * (learners - 1)} latencies one after the other, a step across the links would take "
                f"{beside.ring_step_s:.3g} s instead of {across_s:.3g} s, and decoupled would learn "
                f"{times * beside.ring_step_s / across_s:.3g} times as much"
            )
        say(
            f"compared with one island alone, in batches of 1/{learners} of the tokens, which teach more per token: "
            + _pays_alone(beside)
        )
    f = found.forecasts
    kept = sum(x.kept * x.island.count for x in f) / sum(x.island.count for x in f)

    asked = f" (lengthened from {rules.sync_every})" if found.period > rules.sync_every else ""

    say(
        f"decoupled: H = {found.period}{asked}, P = {rules.fragments}, {rules.merge}, {kept:.0%} of tokens merged, "
        f"{beside.least / one.learnt:.0%} of one place in short runs, {beside.most / one.learnt:.0%} at parity, where "
        "a token is worth as much as in data parallel"
    )
    again = sum(trained_again(x, found.checkpoint_s) * x.island.count for x in f) / sum(x.island.count for x in f)
    if again >= AGAIN_SAID:
        say(
            f"of decoupled steps {again:.0%} are trained again after failures, from older optimizer moments: they "
            "count here, as updates hold the first time; without them "
            f"{(1.0 - again) * ours.learnt / one.learnt:.0%} of one place"
        )
    if learners == 1:
        say(f"{NO_PARTNER}, so there is nothing to compare")
        return
    if ours.usd and one.usd and beside.way(ALONE).usd:
        say(
            f"per dollar, decoupled learns {ours.per_usd / one.per_usd:.0%} of what one place does, and "
            f"{ours.per_usd / beside.way(ALONE).per_usd:.0%} of what one island alone does"
        )
    for line in _worth(found):
        say(line)
    for tie in found.ties:
        say(tie)
    if not any(island.region for island in islands):
        say(f"dollars: {NO_EGRESS if not from_file else 'no egress, since no learner has a region'}")
    if not details:
        say("--details has what the comparison assumes")
        return
    say("the comparison assumes:")
    for assumption in ASSUMED:
        say(f"- {assumption}")


def _pays_alone(beside: Comparison) -> str:
    """Return how much more than one island alone decoupled training learns, for how many dollars, and if it pays."""
    ours, alone = beside.way(DECOUPLED), beside.way(ALONE)
    usd = f", for {ours.usd / alone.usd:.3g} times the dollars" if alone.usd else ""
    times = f"at most {ours.learnt / alone.learnt:.3g} times it{usd}"
    if ours.learnt > alone.learnt:
        return times
    return f"it does not pay: {times}; at parity at most {beside.most / alone.learnt:.3g} times"


def _never(found: Plan, beside: Comparison) -> str:
    """Return why decoupled training learns less than one place even if every learner fails very often."""
    place, ours = beside.goodput_at_least
    away = max(found.forecasts, key=lambda f: f.restart_s)
    return (
        f"because then goodput is {place:.0%} in one place and {ours:.0%} decoupled (a restart there takes "
        f"{away.restart_s:,.0f} s, {away.read_s:,.0f} s of them to read {away.read_gb:.3g} GB), and a token is worth "
        f"{found.worth.long:.2f}, 1 at parity"
    )


def _pays_place(found: Plan, beside: Comparison) -> str:
    def when(hours: float) -> str:
        if math.isinf(hours):
            return "at any failure rate"
        return f"if a learner fails more often than every {_lasting(hours * 3600.0)}"

    here, parity = beside.mtbf_hours, beside.mtbf_hours_at_parity
    even = f"not even if every learner failed every {_lasting(beside.mtbf_least_hours * 3600.0)}"
    even += f", {_never(found, beside)}"
    if here is not None:
        return f"it pays {when(here)}" + ("" if parity is None else f"; at parity {when(parity)}")
    if parity is None:
        return f"it never pays here, nor at parity, {even}"
    return f"it never pays here, {even}; at parity it would pay {when(parity)}"


def _lasting(seconds: float) -> str:
    """Return a duration in the unit in which it is read, as "23 seconds" or "19.7 hours"."""
    units = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
    name = next((name for name, unit in units.items() if seconds >= 2.0 * unit), "seconds")
    return f"{seconds / units[name]:.3g} {name}"


def _pays_links(beside: Comparison) -> str:
    def until(gbit_s: float | None) -> str:
        if gbit_s is None:
            return "never"
        if math.isinf(gbit_s):
            return "at any bandwidth"
        return f"where each link has less than {rates.shown(float(f'{gbit_s:.2g}'))}"

    return f"it pays {until(beside.gbit_s)}; at parity {until(beside.gbit_s_at_parity)}"
