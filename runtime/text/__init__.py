"""Tokenizer, detokenizer, grammars."""
