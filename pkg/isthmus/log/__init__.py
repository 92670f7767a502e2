"""The commit log, which is the run: its objects, the checks on them, and everything computed from them.

run             the run object
creation        creating a run
membership      the log of members: who may take part
replaced        commits made under a membership that another had replaced
expulsions      which learners were expelled, and when
trust           the key that a process brings, and what it demands of a run
verify          checks of every stored object
bus_messages    checks of messages on the bus
updates         an update: checked and measured
commits         reading the log, finding its end, appending to it
listing         choosing fragments, snapshots and checkpoints
holes           finding holes in a log
fork_detection  comparing the commits that different processes read
log_health      the condition of a log
figures         figures that several tools show
merge           the arithmetic of a round
robust, polar   parts of that arithmetic: robust merges, and the polar factor of a matrix
fold            state = fold(merge, snapshot, log)
heal            restarting a fragment whose log cannot be folded
gc              garbage collection
evaluations     measurements of a version of the model
promotions      the versions that have passed the charter's gate
"""

from isthmus.log.commits import Log
from isthmus.log.verify import Commit

__all__ = ["Commit", "Log"]
