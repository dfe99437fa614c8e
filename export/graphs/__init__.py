"""Whole graphs: dynamic, static, swappable, cache compaction."""
