"""The whole system in virtual time: the real agents over a simulated clock, store and bus.

`clock` is an event loop whose time jumps to the next thing that happens; `process` is a simulated process, which can be
paused and killed; `store` and `bus` are the ports, timed and faulty as a `conditions` says. What runs in it is the
library's own code, unchanged.
"""
