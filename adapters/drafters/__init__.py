"""Drafters in training: networks and how they draft."""
