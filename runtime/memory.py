"""Estimates a bundle's memory before it is loaded: the public names of `streamspec.runtime.engine.memory_estimate`."""

from streamspec.runtime.engine.memory_estimate import MemoryEstimate
from streamspec.runtime.engine.memory_estimate import estimate_memory as estimate

Estimate = MemoryEstimate

__all__ = ["Estimate", "MemoryEstimate", "estimate"]
