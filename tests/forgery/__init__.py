"""The forgery matrix: who reads what, forged by whom and how; and what comes of it."""
