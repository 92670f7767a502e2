"""Metrics of training, step by step, to wherever people look at them: sinks of three methods, TensorBoard's for one.

Nothing here can stop a training: a sink that fails is left out and said to be.
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
"""Steps that wait for a slow sink; beyond that the oldest are dropped."""

EVERY_S = 1.0
CLOSE_S = 5.0


class Sink(Protocol):
    """Takes scalars. Called from one thread that does nothing else, one call at a time; it may block."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take what was the case after an optimizer step, over all restarts."""
        ...

    def flush(self) -> None:
        """Let what was taken be seen."""
        ...

    def close(self) -> None:
        """Flush and let go; nothing comes afterwards."""
        ...


class TensorBoard(Sink):
    """Event files for TensorBoard, below a folder. Needs the extra `tensorboard`."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("TensorBoard is not installed: pip install 'isthmus[tensorboard]'") from None
        try:
            # A restart goes on in the same folder; what comes after a step it has seen replaces that step.
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
    """Carries scalars from the training thread to a sink, on a thread of its own.

    A daemon: a sink that hangs keeps neither the agent nor the process from ending.
    """

    def __init__(self, sink: Sink, beside: Callable[[], tuple[int, Mapping[str, float]] | None]) -> None:
        self._sink = sink
        self._beside = beside
        """What else there is to say, once in a while."""
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=WAITING_MAX)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="isthmus-sink", daemon=True)
        self._thread.start()

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Queue what is the case after a step; from any thread, never waits."""
        self._waiting.append((step, values))

    def close(self) -> None:
        """Let the sink have the rest and go; it gets `CLOSE_S` for that."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the sink of training metrics does not end within %g s: left behind", CLOSE_S)

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
        except Exception as error:  # whatever a sink of somebody else's raises
            self._waiting = deque(maxlen=0)
            logger.warning("training metrics go nowhere from here on: %s: %s", type(error).__name__, error)
