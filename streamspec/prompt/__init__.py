"""How a prompt becomes text."""
