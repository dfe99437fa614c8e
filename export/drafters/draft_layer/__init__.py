"""Draft layers: `layer` reads one, `layer_pass` writes its nodes, `layer_reference` computes it in PyTorch."""
