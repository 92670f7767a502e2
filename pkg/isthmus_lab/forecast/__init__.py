"""Models of runs too large to have: goodput under failures, bandwidth for a utilisation, and a planner on top of both.

Plain arithmetic and small discrete-event simulations; nothing here touches a store, a bus or a model's parameters.
"""
