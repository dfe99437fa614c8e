"""The decoder layer, attention, sampling and acceptance as ONNX nodes."""
