"""Sinks for training metrics, step by step: objects with three methods, such as the one for TensorBoard.

Nothing here can stop the training: if a sink fails, a warning is logged and the sink gets no more metrics.
"""

# ruff: noqa: TID251  (a thread: a sink may block for as long as it likes)
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from typing_extensions import override

from isthmus.errors import InputError

logger = logging.getLogger(__name__)

WAITING_MAX = 100_000
"""Steps whose metrics wait for a slow sink; beyond that the oldest are dropped."""

EVERY_S = 1.0
CLOSE_S = 5.0


class Sink(Protocol):
    """Receives scalars. All calls come one at a time from one thread that does nothing else, so they may block."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values after an optimizer step; `step` counts over all restarts."""
        ...

    def flush(self) -> None:
        """Make the scalars visible that were taken so far."""
        ...

    def close(self) -> None:
        """Flush and release resources; no call follows."""
        ...


class TensorBoard(Sink):
    """Writes event files for TensorBoard below a folder. Needs the extra `tensorboard`."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "TensorBoard is not installed: pip install '.[tensorboard]' in a clone of Isthmus"
            ) from None
        try:
            # A restart continues in the same folder; steps that are written again replace the earlier ones.
            self._writer = SummaryWriter(folder)
        except OSError as error:
            raise InputError(f"TensorBoard cannot write below {folder}: {error.strerror}") from None

    @override
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    @override
    def flush(self) -> None:
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()


class Feeder:
    """Passes scalars from the training thread to a sink, on a thread of its own.

    It is a daemon thread: a sink that hangs keeps neither the agent nor the process from ending.
    """

    def __init__(self, sink: Sink, beside: Callable[[], tuple[int, Mapping[str, float]] | None]) -> None:
        self._sink = sink
        self._beside = beside
        """Returns further scalars with their step, or None; called every `EVERY_S` seconds."""
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=WAITING_MAX)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="isthmus-sink", daemon=True)
        self._thread.start()

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the values after a step. Any thread may call it; it never waits."""
        self._waiting.append((step, values))

    def close(self) -> None:
        """Pass the rest to the sink and close it; wait for that `CLOSE_S` seconds at most."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the sink of training metrics did not close within %g s and is abandoned", CLOSE_S)

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                closing = self._closing.wait(EVERY_S)
                if (more := self._beside()) is not None:
                    self.note(*more)
                while self._waiting:
                    self._sink.scalars(*self._waiting.popleft())
                self._sink.flush()
            self._sink.close()
        except Exception as error:  # a sink is foreign code and may raise anything
            self._waiting = deque(maxlen=0)
            logger.warning("training metrics are no longer written: %s: %s", type(error).__name__, error)
