"""streamspec.demo: runs the whole loop on the reference base with a shipped SQL adapter, and draws the result."""

from streamspec.demo.run import demo

__all__ = ["demo"]
