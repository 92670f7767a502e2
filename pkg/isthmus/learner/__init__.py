"""The learner: its `boundary` between training steps, its `agent` for store and bus, the `ledger` of its tokens."""

from isthmus.learner.agent import LearnerAgent
from isthmus.learner.boundary import Boundary, Replica

__all__ = ["Boundary", "LearnerAgent", "Replica"]
