"""A block drafter: `config` says which shapes it may have, `model` is the network."""
