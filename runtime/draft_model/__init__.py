"""A second, smaller bundle that drafts for the one that answers (Leviathan et al. 2023, arXiv 2211.17192)."""
