"""The output of a training run for its user: progress, figures while it runs, and its verdict."""
