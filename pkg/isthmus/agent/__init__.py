"""What agents of learners and of syncers share: ways to a run, its outages, and their health."""
