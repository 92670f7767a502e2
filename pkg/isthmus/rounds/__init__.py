"""The rounds of a fragment, without I/O: who is there, when to stop waiting, and what happens.

events   what happens, and what to do    rounds   the state machine
grace    how long waiting is worth it    members  who is there
"""

from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import Rounds

__all__ = ["LiveLearners", "Rounds"]
