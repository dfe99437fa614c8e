"""Costs of steps by their rows, learned from the times of steps, and decisions whether drafting pays."""
