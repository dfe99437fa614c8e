"""One training run: options, data, losses, stages, evaluation."""
