"""Benchmarks: every figure beside a limit or a peer that was measured in the same run, in turns with it."""
