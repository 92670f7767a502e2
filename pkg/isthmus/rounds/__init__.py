"""The rounds of a fragment, without I/O: who is there, when to stop waiting, and what happens."""
