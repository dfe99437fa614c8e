"""Step graphs run on ONNX Runtime with plain numpy arrays."""
