"""What a step costs by its rows: known, or learned from the times of steps."""
