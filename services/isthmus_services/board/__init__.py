"""A page of a run, live and in the past: what it knows, what it answers, and how it is served or written to a file."""
