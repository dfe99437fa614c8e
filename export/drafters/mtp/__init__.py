"""The multi-token prediction layer that a checkpoint holds beside its model (docs/guides/published-drafters.md)."""
