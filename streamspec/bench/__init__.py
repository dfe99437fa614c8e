"""Measures how fast, how exact and how good a bundle is on prompts of yours."""

from streamspec.bench.measure import bench
from streamspec.bench.quality import compare
from streamspec.bench.report import Report

__all__ = ["Report", "bench", "compare"]
