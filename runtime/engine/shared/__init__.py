"""Calls that verify drafts of several sequences at once: who joins, what is bound, and whether it pays."""
