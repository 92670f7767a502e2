"""One module for each command. Its `run(settings)` executes the command and returns the exit code."""
