"""Measures how fast, how exact and how good a bundle is on prompts of yours."""

from streamspec.bench.figures import Report
from streamspec.bench.measure import bench
from streamspec.bench.quality import compare

__all__ = ["Report", "bench", "compare"]
