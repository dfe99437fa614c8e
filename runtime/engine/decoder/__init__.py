"""Calls of ONNX decoders that others exported."""
