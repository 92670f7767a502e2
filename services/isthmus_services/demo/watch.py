"""What is seen while the demo runs: a live display on a terminal, plain lines into a pipe."""

import sys
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live as Display
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from isthmus.log import Commit
from isthmus.status import Live
from isthmus_services import view

LINES_EVERY_S = 5.0


class Watch:
    """Keeps what was heard and seen of a run, and shows it."""

    def __init__(self, run_name: str, learners: int, steps: int, run: Live) -> None:
        self.phase = "starting"
        self._name = run_name
        self._learners = learners
        self._steps = steps
        self._run = run
        self._seen = 0
        self._took_part = 0.0
        self._kills = 0
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._line_at = 0.0
        self._console = Console()
        self._live: Display | None = None
        if sys.stdout.isatty() and not self._console.is_dumb_terminal:
            self._live = Display(self._render(), console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Watch":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def committed(self, commit: Commit) -> None:
        """Note a commit."""
        self._seen += 1
        self._took_part += len(commit.header.inputs) / self._learners

    def show(self, kills: int) -> None:
        """Show the present state."""
        self._kills = kills
        if self._live:
            self._live.update(self._render())
        elif time.monotonic() - self._line_at >= LINES_EVERY_S:
            self._line_at = time.monotonic()
            print(self._line(), flush=True)

    def say(self, text: str) -> None:
        """Print one line, above the live display where there is one."""
        if self._live:
            self._live.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _steps_done(self) -> int:
        return sum(view.step for view in self._run.hearing.learners.values())

    @property
    def _left_s(self) -> float | None:
        done, now = self._steps_done, time.monotonic()
        if done and self._first is None:
            self._first = now, done
        if self._first is None or done <= self._first[1]:
            return None
        rate = (done - self._first[1]) / (now - self._first[0])
        return (self._steps * self._learners - done) / rate

    def _totals(self) -> tuple[float, int]:
        return self._took_part / max(self._seen, 1), sum(commit.version for commit in self._run.commits.values())

    def _line(self) -> str:
        participation, commits = self._totals()
        steps = " ".join(str(view.step) for _, view in sorted(self._run.hearing.learners.items()))
        beats = [
            v.heartbeat for v in self._run.hearing.learners.values() if v.heartbeat and v.heartbeat.loss is not None
        ]
        loss = sum(b.loss or 0.0 for b in beats) / len(beats) if beats else float("nan")
        left = self._left_s
        return (
            f"{time.monotonic() - self._started:6.0f} s  {self.phase}  steps {steps or '-'} of {self._steps}  "
            f"train loss {loss:.3f}  commits {commits}  participation {participation:.0%}  kills {self._kills}"
            + (f"  about {left:.0f} s left" if left is not None else "")
        )

    def _render(self) -> RenderableType:
        participation, commits = self._totals()
        left = self._left_s
        total = self._steps * self._learners
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"{self._name}  {self.phase}"),
            ProgressBar(total=total, completed=min(self._steps_done, total), width=40),
            Text(
                f"{commits} commits  participation {participation:.0%}  kills {self._kills}"
                + (f"  about {left:.0f} s left" if left is not None else "")
            ),
        )
        status, width = self._run.status(), self._console.width
        return Group(head, view.learners(status, width), view.fragments(status, width))
