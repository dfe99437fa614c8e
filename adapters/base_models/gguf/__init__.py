"""GGUF files as bases: read, understood whole, written as a Hugging Face folder."""
