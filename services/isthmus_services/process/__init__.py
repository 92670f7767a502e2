"""What a service that runs for long shows of itself: health and metrics over HTTP, logs, a line a minute."""
