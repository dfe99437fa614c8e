"""Descriptions that every part of an export reads: the decoder, a drafter, where weights come from."""
