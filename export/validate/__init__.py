"""Exported graphs compared with PyTorch."""
