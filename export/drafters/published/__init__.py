"""Drafters that others published: EAGLE-3 heads, DFlash, DSpark, Gemma 4's assistants. `read` takes one into an export,
`eagle3_config`, `block_config` and `assistant_config` read its configuration, `write` writes a trained head for others.
What the formats are: docs/guides/published-drafters.md.
"""
