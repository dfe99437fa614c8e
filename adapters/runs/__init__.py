"""A run and its folder: who writes there, what went wrong in one line, and how a finished adapter goes on."""
