"""What a layer computes after its attention: an MLP, or a mixture of experts in its place."""
