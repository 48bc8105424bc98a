"""Algorithms in one file each, which ``jaxrl-dist new`` writes for users to change.

Each computes, bit by bit, what the algorithm of its name in ``algorithms`` does. It imports no
shared part of algorithms, so that a reader needs no other file.
"""
