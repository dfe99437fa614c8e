"""A draft layer in the form of EAGLE-3 heads, which others serve."""
