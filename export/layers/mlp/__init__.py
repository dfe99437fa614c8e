"""What a layer computes after its attention: an MLP."""
