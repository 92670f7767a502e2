"""The rounds of a fragment, without I/O: which learners are live, when a round opens, and when it stops waiting.

events     events of a round, and actions         rounds         the state machine
grace      how long to wait after the quorum      live_learners  the learners heard of, and their speeds
admission  how many rounds are under way at once  bounds         how much one update may count for
period     steps between two uploads of a fragment
"""
