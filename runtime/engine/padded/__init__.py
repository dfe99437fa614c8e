"""Calls of step graphs with fixed row counts: static ones, and those that a device captures."""
