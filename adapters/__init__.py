"""Training: a base model and data in, an adapter folder out (torch, transformers, peft)."""
