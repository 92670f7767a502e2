"""The learner: `boundary` between training steps, `agent` between learner and world, `ledger` of where tokens went."""

from isthmus.learner.agent import LearnerAgent
from isthmus.learner.boundary import Boundary, Replica

__all__ = ["Boundary", "LearnerAgent", "Replica"]
