"""The commit log, which is the run: reading and appending, what it adds up to, and what may be done to it.

run      the run object                  updates  an update, checked
commits  reading, the end, appending     merge    the arithmetic of a round
select   what is meant, where to begin   fold     state = fold(merge, snapshot, log)
gc       what may go                     heal     a fragment starts again where its log cannot be folded
"""

from isthmus.log.commits import Commit, Log

__all__ = ["Commit", "Log"]
