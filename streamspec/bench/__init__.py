"""Measures how fast, how exact and how good a bundle is on prompts of yours."""

from streamspec.bench.quality import compare
from streamspec.bench.report import Report
from streamspec.bench.runner import bench

__all__ = ["Report", "bench", "compare"]
