"""The whole system in virtual time: the real agents over a simulated clock, store and bus.

`clock` is an event loop whose time jumps to the next event. `process` is a simulated process, which can be paused and
killed. `store` and `bus` are the ports, with the delays and faults that `conditions` sets. `world` connects them. The
library's own code runs in it, unchanged.
"""
