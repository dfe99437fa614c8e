"""Gemma 4's assistants, small models over the target's keys and values (docs/guides/published-drafters.md)."""
