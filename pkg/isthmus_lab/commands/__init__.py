"""The laboratory's commands: simulate, plan and bench."""
