"""What a user sees of a training run: progress, figures while it runs, and what it came to."""
