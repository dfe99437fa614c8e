"""Speculative streams: `stream_pass` reads them and writes their nodes, `stream_reference` computes them in PyTorch."""
