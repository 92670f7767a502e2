"""The mistakes, by what they are made in."""
