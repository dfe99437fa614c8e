"""A draft layer in the form of EAGLE-3 heads, which others serve: `pair_config` says which bases can have one,
`pair_layer` is the network."""
