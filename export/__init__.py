"""streamspec.export."""
