"""A draft layer in the form of EAGLE-3 heads, which others serve: `config` says which bases can have one,
`model` is the network."""
