"""The mistakes, by the part of the library that they are in."""
