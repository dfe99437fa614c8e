"""A block drafter: `block_config` says which shapes it may have, `block_drafter` is the network."""
