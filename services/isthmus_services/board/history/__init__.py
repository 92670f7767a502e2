"""The history of a run as the board shows it: a table of commits, sums in time buckets, and views of both."""
