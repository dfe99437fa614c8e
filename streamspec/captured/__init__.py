"""Calls of a graph that a device captures."""
