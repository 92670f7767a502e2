"""Output of the commands: tables, progress, reports and pictures."""
