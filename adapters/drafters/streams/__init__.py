"""Speculative streams: rows of their own through the last layers of the target."""
