"""What a step costs by its rows, learned from the times of steps, and whether drafting pays."""
