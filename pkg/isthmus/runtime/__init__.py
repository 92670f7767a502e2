"""Clocks, threads, metrics and URLs."""
