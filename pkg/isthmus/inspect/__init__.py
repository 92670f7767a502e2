"""Tools that read a run, from its log, its bus or both, and take no part in it."""
