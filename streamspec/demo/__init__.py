"""streamspec.demo."""
