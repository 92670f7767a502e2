"""Benchmarks. Each figure stands beside a limit or a peer that was measured in turns with it, in the same run."""
