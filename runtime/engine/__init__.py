"""ONNX Runtime sessions, KV cache, scheduling, unloading."""
