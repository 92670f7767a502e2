"""The commit log, which is the run: reading and appending, what it adds up to, and what may be done to it.

run      the run object                  creation  how it comes to be
verified  what is stored, judged         updates   an update, judged and measured
commits  reading, the end, appending     histories whether all are shown the same log
select   what is meant, where to begin   merge     the arithmetic of a round
gc       what may go                     fold      state = fold(merge, snapshot, log)
evaluations  numbers that somebody       heal      a fragment starts again where its log cannot be folded
         has measured of a version
"""

from isthmus.log.commits import Log
from isthmus.log.verified import Commit

__all__ = ["Commit", "Log"]
