"""JSON schemas in the terms of the grammar library, and what it cannot be told."""
