"""Loops over many numbers, in two ways that give the same bytes: numpy's, and compiled ones."""
