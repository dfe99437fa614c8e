"""Drafters that others published: EAGLE-3 heads, DFlash and DSpark. `read` takes one into an export,
`eagle3_config` and `block_config` read its configuration, `write` writes a trained head for others.
What the formats are: docs/guides/published-drafters.md.
"""
