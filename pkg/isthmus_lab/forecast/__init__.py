"""Models of runs too large to test: goodput under failures, bandwidth for a utilisation, and a planner built on both.

They are plain arithmetic and small discrete-event simulations. Nothing here uses a real store, a real bus or a model's
parameters.
"""
