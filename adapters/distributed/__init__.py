"""A run on several processes, as torchrun and accelerate start them: who is who, sums over all, rows for each."""
