"""Calls of a step graph that a device captures: fixed addresses, one copy in and one out."""
