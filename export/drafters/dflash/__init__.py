"""Block drafters."""
