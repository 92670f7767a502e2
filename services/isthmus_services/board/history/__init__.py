"""What a run did, as the board shows it: in buckets of time."""
