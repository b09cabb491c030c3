"""Checks that several steps use: of one forward of the solution, and of what is wrong with it."""
