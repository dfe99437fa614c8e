"""A block drafter: `block_pass` reads it and writes its nodes, `block_reference` computes it in PyTorch."""
