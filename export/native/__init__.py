"""The graph of native operators: layout of weights, and the nodes that replace those of standard operators."""
