"""The blocks of quantized weights in GGUF files: what they hold, and how they are decoded."""
