"""streamspec.adapters."""
