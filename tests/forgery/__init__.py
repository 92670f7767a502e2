"""The forgery matrix: every reader reads every kind of object, forged by every forger in every way."""
