"""What a long-running service reports: health and metrics over HTTP, logs, and a line a minute."""
