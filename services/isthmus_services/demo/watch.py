"""Display of a running demo: live on a terminal, plain lines into a pipe."""

import math
import sys
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live as Display
from rich.progress_bar import ProgressBar
from rich.text import Text

from isthmus.inspect.live import Live
from isthmus.log import Commit
from isthmus.log.figures import LogSums
from isthmus_services.demo.left import LAST, TRAINING, Left
from isthmus_services.output import view
from isthmus_services.output.tables import WIDEN, in_view

LINES_EVERY_S = 5.0
REFRESH_S = 0.5


class Watch:
    """Shows the phase of a demo, its learners, commits and kills, and the remaining time."""

    def __init__(self, run_name: str, learners: int, steps: int, run: Live, left: Left) -> None:
        self._name = run_name
        self._learners = learners
        self._steps = steps
        self._run = run
        self._left = left
        self._phase = "starting"
        self._share: float | None = None
        """Share of a phase after training that is done; None if none was reported."""
        self._sums = LogSums()
        """Figures of the commits that were read."""
        self._kills = 0
        self._started = time.monotonic()
        self._line_at = -math.inf
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
        """Count a commit and the learners that took part in it."""
        self._sums.take(commit.header)

    def enter(self, phase: str) -> None:
        """Begin a phase and show it at once."""
        self._phase, self._share = phase, None
        self._left.enter(phase)
        self._line_at = -math.inf
        self._present()

    def done(self, share: float) -> None:
        """Show which share of the phase is done."""
        self._share = share
        self._left.at(share)
        self._present()

    def show(self, kills: int) -> None:
        """Show the progress of training, and how many kills there were."""
        self._kills = kills
        if self._phase == TRAINING:
            self._left.at(self._steps_done / (self._steps * self._learners))
        self._present()

    def say(self, text: str) -> None:
        """Print one line, above the live display if there is one."""
        if self._live:
            self._live.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _present(self) -> None:
        # Rendering the tables takes milliseconds on cores that the learners need, so it is done at intervals.
        if time.monotonic() - self._line_at < (REFRESH_S if self._live else LINES_EVERY_S):
            return
        self._line_at = time.monotonic()
        if self._live:
            self._live.update(self._render())
        else:
            print(self._line(), flush=True)

    @property
    def _steps_done(self) -> int:
        return sum(view.step for view in self._run.hearing.learners.values())

    @property
    def _trains(self) -> bool:
        """Whether the run still changes: the learners train, or the syncer merges their last updates."""
        return self._phase in ("starting", TRAINING, LAST)

    def _left_said(self) -> str:
        left = self._left.seconds
        return "" if left is None else f"  about {max(1.0, left):.0f} s left"

    def _phase_said(self) -> str:
        return self._phase if self._share is None else f"{self._phase} {self._share:.0%}"

    def _totals(self) -> tuple[float, int]:
        return self._sums.participation or 0.0, sum(commit.version for commit in self._run.commits.values())

    def _starting(self) -> str:
        return f"{self._learners} learners and a syncer start, which takes up to half a minute"

    def _line(self) -> str:
        head = f"{time.monotonic() - self._started:6.0f} s  {self._phase_said()}"
        if not self._trains:
            return head + self._left_said()
        if not self._run.hearing.learners:
            return f"{head}  {self._starting()}{self._left_said()}"
        participation, commits = self._totals()
        learners = sorted(self._run.hearing.learners.items())
        steps = " ".join(str(view.step) for _, view in learners)
        losses = [v.heartbeat.loss for _, v in learners if v.heartbeat and v.heartbeat.loss is not None]
        losses = [loss for loss in losses if math.isfinite(loss)]
        loss = f"  train loss {sum(losses) / len(losses):.3f}" if losses else ""
        return (
            f"{head}  steps {steps} of {self._steps}{loss}  commits {commits}  "
            f"participation {participation:.0%}  kills {self._kills}{self._left_said()}"
        )

    def _render(self) -> RenderableType:
        width = self._console.width
        total = self._steps * self._learners
        done = min(self._steps_done / total, 1.0) if self._trains else self._share or 0.0
        participation, commits = self._totals()
        said = f"{commits} commits  participation {participation:.0%}  kills {self._kills}" if self._trains else ""
        head: list[RenderableType] = [
            Text(f"{self._name}  {self._phase_said()}{self._left_said()}"),
            ProgressBar(total=1.0, completed=done, width=min(60, width)),
        ]
        if not self._trains:
            return Group(*head)
        if not self._run.hearing.learners:
            said = self._starting()
        status = self._run.status()
        tables = view.learners(status, width, WIDEN), view.fragments(status, width, WIDEN)
        return in_view(Group(*head, Text(said), *tables), self._console)
