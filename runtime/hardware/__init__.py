"""Execution providers and what this machine is."""
