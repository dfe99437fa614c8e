"""Precisions of linear maps, and their arithmetic."""
