"""The laboratory: forecasts, simulated worlds, training experiments, benchmarks and plans."""
