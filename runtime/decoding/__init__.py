"""Pure decoding: draft, verify, accept, commit, sample. No ONNX Runtime."""
