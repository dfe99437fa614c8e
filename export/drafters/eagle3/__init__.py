"""EAGLE-3 heads that others published: `head_config` reads a head's configuration, `head` its tensors, `head_pass`
writes its nodes, `head_reference` computes it in PyTorch. What the formats are: docs/guides/published-drafters.md.
"""
