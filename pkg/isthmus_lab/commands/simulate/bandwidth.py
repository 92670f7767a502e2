"""`isthmus simulate bandwidth`: the bandwidth that each method needs, as a table, JSON and a picture."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from isthmus.errors import InputError
from isthmus.format.rules import Pace, Rules
from isthmus_lab.commands import settings_classes
from isthmus_lab.forecast import bandwidth as model
from isthmus_lab.forecast import traffic
from isthmus_lab.forecast.bandwidth import DATA_PARALLEL, DECOUPLED, DILOCO, STREAMING, OnTheWire, Setup
from isthmus_services.output.progress import progress
from isthmus_services.output.report import MARKERS, save, stdout, write_json
from isthmus_services.settings import shared

PAPER = (OnTheWire(name="bf16", up_bits=16.0, down_bits=16.0), OnTheWire(name="int4", up_bits=4.0, down_bits=4.0))
"""Codecs as the papers count them: bits of payload only, no headers or messages."""

MARK_EVERY = 10
"""Points of a line from one marker to the next."""

OWN = (("bf16", "bf16"), ("int4", "int8"), ("int4", "int4"))
"""Pairs of this library's codecs: up, down."""

Row = dict[str, Any]


def run(arguments: settings_classes.Bandwidth) -> int:
    """Compute every row, then print, write and draw the rows; return the exit status."""
    if arguments.plot:
        shared.need("matplotlib", "demo")
    link = Setup(
        params=arguments.params,
        step_s=arguments.step_seconds,
        learners=arguments.learners,
        sync_every=arguments.sync_every,
        fragments=arguments.fragments,
        overlap=arguments.overlap,
        latency_s=arguments.latency,
    ).check()
    if link.learners == 1:
        raise InputError("--learners 1: a single learner exchanges no updates and needs no link; use 2 or more")
    wanted = arguments.utilization or ([] if arguments.gbit_s else [0.9])
    for utilization in wanted:
        if not 0.0 < utilization < 1.0:
            raise InputError(f"--utilization {utilization:g}: a share between 0 and 1, such as 0.9")
    for gbit_s in arguments.gbit_s or ():
        if not (math.isfinite(gbit_s) and gbit_s > 0.0):
            raise InputError(f"--gbit-s {gbit_s:g}: must be more than 0")
    with progress("bandwidth: measuring headers and messages") as say:
        methods = choices(link)
        rows: list[Row] = []
        cells = [(m, c, u, None) for u in wanted for m, c in methods]
        cells += [(m, c, None, g) for g in arguments.gbit_s or () for m, c in methods]  # type: ignore[misc]
        for n, (method, codec, utilization_, gbit_s_) in enumerate(cells):
            rows.append(_row(link, method, codec, utilization_, gbit_s_))
            say((n + 1) / len(cells))
    console = stdout()
    console.print(_table(rows))
    console.print(
        f"assumed unless given: H = {link.sync_every} (--sync-every), P = {link.fragments} (--fragments), τ = "
        f"{link.overlap:g} steps (--overlap), latency {link.latency_s:g} s (--latency)",
        highlight=False,
    )
    found = reproductions()
    console.print(_published(found))
    write_json(
        {
            "rows": rows,
            "setting": {**vars(link)},
            "codecs": [vars(c) for c in dict.fromkeys(c for _, c in methods)],
            "published": found,
        },
        arguments.json,
    )
    if arguments.plot:
        draw(link, methods, Path(arguments.plot))
        print(f"picture: {arguments.plot}")
    return 0


def choices(link: Setup) -> list[tuple[str, OnTheWire]]:
    """Return pairs of a method and a codec.

    This library's own codecs come last. They include the measured bytes of headers, commits and messages.
    """
    bf16, int4 = PAPER
    found = [(DATA_PARALLEL, bf16), (DILOCO, bf16), (STREAMING, bf16), (STREAMING, int4), (DECOUPLED, bf16)]
    found.append((DECOUPLED, int4))
    rules = Rules(fragments=link.fragments, sync_every=link.sync_every).check()
    cost = traffic.measure(rules, Pace(), min(link.learners, traffic.LEARNERS_MAX)).learner
    return found + [(DECOUPLED, traffic.own_codec(link, up, down, cost)) for up, down in OWN]


def _row(link: Setup, method: str, codec: OnTheWire, utilization: float | None, gbit_s: float | None) -> Row:
    note = None
    if gbit_s is None:
        assert utilization is not None, "one of the two is asked for"
        try:
            gbit_s = model.required(method, link, codec, utilization)
        except InputError as error:
            note = str(error)
    else:
        utilization = model.simulate(method, link, codec, gbit_s)
    return {
        "method": method,
        "codec": codec.name,
        "params": link.params,
        "step_seconds": link.step_s,
        "learners": link.learners,
        "utilization": utilization,
        "gbit_per_s": gbit_s,
        **({"note": note} if note else {}),
    }


def reproductions() -> list[Row]:
    """Return the published figures beside this model's, each with the settings that give it.

    Where the size of a model was not published, it is fitted to one figure. Rows of a setting whose figure was not
    published have None in its place.
    """
    bf16, int4 = PAPER
    found = []

    def compare(what: str, published: float, link: Setup, method: str, codec: OnTheWire, how: str) -> None:
        ours = model.required(method, link, codec, 0.9)
        found.append(
            {
                "what": what,
                "published": published,
                "ours": ours,
                "error": ours / published - 1.0,
                "params": link.params,
                "learners": link.learners,
                "how": how,
            }
        )

    small = Setup(params=2.9e9)
    compare("data parallel", 104.0, small, DATA_PARALLEL, bf16, "2.9e9 parameters chosen to fit this one")
    compare("decoupled, bf16", 1.7, small, DECOUPLED, bf16, "predicted")
    compare("decoupled, int4", 0.43, small, DECOUPLED, int4, "predicted")
    # The bandwidth is proportional to the model's size, so one published figure gives the size.
    size = 2.9e9 * 198.0 / model.required(DATA_PARALLEL, small, bf16, 0.9)
    large = replace(small, params=size)
    compare("8 centres: data parallel", 198.0, large, DATA_PARALLEL, bf16, f"{size:.3g} parameters chosen to fit it")
    compare("8 centres: decoupled", 0.84, large, DECOUPLED, int4, "predicted")
    regions = Setup(params=12e9, learners=4)
    for gbit_s in (2.0, 5.0):
        for codec in (bf16, int4):
            found.append(
                {
                    "what": f"12e9 over 4 regions, {gbit_s:g} Gbit/s, {codec.name}",
                    "published": None,
                    "ours": model.simulate(DECOUPLED, regions, codec, gbit_s),
                    "error": None,
                    "params": 12e9,
                    "learners": 4,
                    "how": f"utilisation at 1 s steps; 90 % from {_least_step(regions, codec, gbit_s):.2g} s steps on",
                }
            )
    return found


def _least_step(link: Setup, codec: OnTheWire, gbit_s: float) -> float:
    low, high = 1e-3, 1e3
    for _ in range(50):
        middle = math.sqrt(low * high)
        enough = model.simulate(DECOUPLED, replace(link, step_s=middle), codec, gbit_s) >= 0.9
        low, high = (low, middle) if enough else (middle, high)
    return high


# --- shown ------------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"{first['params']:.3g} parameters, {first['step_seconds']:g} s steps, {first['learners']} learners"
    table = Table(title=title, title_justify="left")
    for name in ("method", "codec", "utilisation", "Gbit/s"):
        table.add_column(name, justify="left" if name in ("method", "codec") else "right")
    for row in rows:
        gbit_s = row["gbit_per_s"]
        table.add_row(
            row["method"],
            row["codec"],
            f"{row['utilization']:.1%}",
            f"{gbit_s:.3g}" if gbit_s is not None else "none would do",
        )
    return table


def _published(rows: Sequence[Row]) -> Table:
    table = Table(title="published figures, and the settings that give them (90 % utilisation)", title_justify="left")
    for name in ("what", "published", "ours", "off by", "how"):
        table.add_column(name, justify="left" if name in ("what", "how") else "right")
    for row in rows:
        known = row["published"] is not None
        table.add_row(
            row["what"],
            f"{row['published']:g} Gbit/s" if known else "",
            f"{row['ours']:.3g} Gbit/s" if known else f"{row['ours']:.0%}",
            f"{row['error']:+.1%}" if known else "",
            row["how"],
        )
    return table


def draw(link: Setup, methods: Sequence[tuple[str, OnTheWire]], path: Path) -> None:
    """Draw the bandwidth that each method needs against utilisation."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 5), layout="constrained")
    wanted = [0.3 + 0.01 * n for n in range(70)]
    styles = {DATA_PARALLEL: "tab:red", DILOCO: "tab:orange", STREAMING: "tab:green", DECOUPLED: "tab:blue"}
    dashes = ("-", "--", ":", "-.", (0, (1, 3)))
    drawn: dict[str, int] = {}
    for number, (method, codec) in enumerate(methods):
        points = []
        for utilization in wanted:
            try:
                points.append((utilization, model.required(method, link, codec, utilization, model.exact)))
            except InputError:
                break  # the latency alone makes this utilisation impossible, and every higher one
        dash = dashes[drawn.setdefault(method, 0) % len(dashes)]
        drawn[method] += 1
        axis.plot(
            [x for x, _ in points], [y for _, y in points], linestyle=dash, color=styles[method],
            # Each line has its markers at other points, so that lines that coincide can be told apart.
            marker=MARKERS[number % len(MARKERS)], markersize=5, markevery=(number % MARK_EVERY, MARK_EVERY),
            label=f"{method}, {codec.name}",
        )  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("compute utilisation")
    axis.set_ylabel("Gbit/s per learner, each way")
    axis.set_title(f"{link.params:.3g} parameters, {link.step_s:g} s steps, {link.learners} learners", fontsize=11)
    axis.grid(alpha=0.3, which="both")
    figure.legend(fontsize=8, loc="outside right upper")
    save(figure, path)
    plt.close(figure)
