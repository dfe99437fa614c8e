"""ONNX nodes and weights: the scopes that graphs are written in."""
