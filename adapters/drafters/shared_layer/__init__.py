"""Draft layers that are the target's own last layer under a LoRA."""
