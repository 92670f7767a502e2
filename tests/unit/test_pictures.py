"""Plots can be read without colour: no two lines of a plot share both marker and dash."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

matplotlib = pytest.importorskip("matplotlib")

from isthmus_lab.commands.simulate import bandwidth, goodput  # noqa: E402
from isthmus_services import main as cli  # noqa: E402
from isthmus_services.commands import replay  # noqa: E402
from isthmus_services.output import report  # noqa: E402


def styles(figure: Any) -> list[tuple[str, str]]:
    return [
        (line.get_linestyle(), line.get_marker())
        for axis in figure.axes
        for line in axis.get_lines()
        if len(line.get_xdata()) > 1
    ]


@pytest.mark.parametrize(
    ("module", "command"),
    [
        (bandwidth, ["simulate", "bandwidth", "--params", "1e9"]),
        (
            goodput,
            [
                "simulate",
                "goodput",
                "--chips",
                "64,512",
                "--slice-chips",
                "8",
                "--learners",
                "1,2,4,8",
                "--failures",
                "20",
            ],
        ),
    ],
)
def test_lines_differ_by_more_than_colour(
    module: ModuleType, command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []
    monkeypatch.setattr(module, "save", lambda figure, path: seen.extend(styles(figure)))
    assert cli.main([*command, "--plot", str(tmp_path / "p.png")]) == 0
    assert len(seen) >= 4
    markers = [marker for _, marker in seen]
    assert len(set(markers)) == len(markers)


def test_what_if_draws_its_two_norms_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from isthmus.inspect.whatif import Departure

    rows = [
        Departure(version=v, inputs_recorded=1, inputs_other=1, difference=1.0 * v, way=2.0, cosine=0.9) for v in (1, 2)
    ]
    seen = []
    monkeypatch.setattr(replay, "save", lambda figure, path: seen.extend(styles(figure)))
    replay._plot(tmp_path / "p.png", rows, "merge=avg")
    assert len({dash for dash, _ in seen[:2]}) == 2


def test_a_picture_has_few_colours_and_any_other_format_stays_as_it_is(tmp_path: Path) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0.0, 1.0])
    report.save(figure, tmp_path / "new" / "p.png")
    report.save(figure, tmp_path / "new" / "p.svg")
    with Image.open(tmp_path / "new" / "p.png") as found:
        assert found.mode == "P"
        assert found.size == (240, 120)
        assert found.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
    assert "<svg" in (tmp_path / "new" / "p.svg").read_text()
