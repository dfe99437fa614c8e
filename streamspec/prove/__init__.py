"""Proves, on the machine it runs on, that what a bundle writes does not depend on how it is computed."""

from streamspec.prove.check import Check
from streamspec.prove.proof import Proof, prove

__all__ = ["Check", "Proof", "prove"]
