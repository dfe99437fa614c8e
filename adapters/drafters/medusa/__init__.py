"""Medusa heads: one residual block for each draft token."""
