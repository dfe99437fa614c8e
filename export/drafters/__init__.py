"""Drafters in the graph."""
