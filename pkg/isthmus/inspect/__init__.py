"""Whoever reads a run and takes no part in it: from the log, from the bus, from both."""
