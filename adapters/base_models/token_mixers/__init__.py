"""Layers that mix rows otherwise than attention does, over rows in any order."""
