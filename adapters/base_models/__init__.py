"""Base models: resolve, download, convert, read."""
