"""Runs ONNX decoders that others exported (optimum-onnx, onnxruntime-genai): describes their folders as bundles."""
