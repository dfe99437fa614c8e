"""The model and the drafters in float32, by PyTorch or numpy, that graphs are compared with."""
