"""Speculative streams, after acceptance or beside every node of the tree."""
