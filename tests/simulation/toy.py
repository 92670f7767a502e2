"""The model that simulated learners train: plain arrays, and a variant whose every read and write is recorded."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from isthmus.codecs.kernels import F32
from isthmus.format.layout import Layout
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Boundary, Replica
from isthmus.learner.checkpoint import LoopState, Saver
from isthmus_lab.simulate.world import Arrays
from simulation.checker import Checker


class Toy:
    """A model of plain arrays that shrink with noise, without torch."""

    def __init__(self, draw_: random.Random, step_s: float, evaluation_s: Callable[[], float] = lambda: 0.0) -> None:
        self._draw = draw_
        self._step_s = step_s
        self._evaluation_s = evaluation_s
        self.model: Arrays

    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Replica, Saver | None]:
        self.model = Arrays(layout)
        return self.model, None

    def duration(self) -> float:
        return self._step_s * self._draw.uniform(0.8, 1.2) + self._evaluation_s()

    def step(self, number: int) -> tuple[int, float]:
        for values in self.model.values:
            values -= np.float32(0.05) * values + np.float32(self._draw.gauss(0.0, 0.01))
        return self._draw.randrange(1, 100), 1.0

    def enough(self, agent: LearnerAgent) -> bool:
        return False


class Watched(Toy):
    """A model whose parameters are checked whenever they are copied out or set."""

    def __init__(self, checker: Checker, name: str, life: int, adopt: str, *more: Any) -> None:
        super().__init__(*more)
        self._checker = checker
        self._name, self._life, self._adopt = name, life, adopt

    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Replica, Saver | None]:
        self.model = Arrays(layout)
        values = self._checker.values
        self.record = values.lives(f"{self._name}, life {self._life}", self._name, agent, self.model)
        self._checker.lives[self._name, self._life] = self.record
        return self, self

    def attached(self, boundary: Boundary) -> None:
        self._checker.values.attached(self.record, boundary)

    def read(self, fragment: int, out: F32) -> None:
        self.model.read(fragment, out)
        self._checker.values.read(self.record, fragment, out)

    def write(self, fragment: int, values: F32) -> None:
        local = self.model.values[fragment].copy()
        self.model.write(fragment, values)
        self._checker.values.write(self.record, fragment, local, self.model.values[fragment], self._adopt)

    def mark(self, now: object) -> None:
        pass

    def moved(self, orderly: bool) -> None:
        return None

    def save(self) -> LoopState:
        self._checker.values.freeze(self.record)
        return LoopState()

    def take(self, node: object) -> None:
        return None
