"""One module for each command: `run(settings)` does what it is for, and returns its exit code."""
