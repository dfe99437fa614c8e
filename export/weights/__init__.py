"""Weights of the base and its adapters, read layer by layer."""
