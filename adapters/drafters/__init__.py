"""Drafters in training: networks, losses, options, and the table of all methods."""
