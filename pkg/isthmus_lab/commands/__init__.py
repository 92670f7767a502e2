"""The commands that the laboratory brings: simulate, plan and bench."""
