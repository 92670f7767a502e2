"""The board, a page of a run, live and in the past: its data, its answers, and the server and export of the page."""
