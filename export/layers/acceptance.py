"""Writes acceptance as nodes: finds the deepest node of a draft tree that the target itself would have written."""

from __future__ import annotations

from onnx import TensorProto

from streamspec.export.ops.builder import Scope

FLOAT = TensorProto.FLOAT


def deepest_standing(g: Scope, tokens: str, expected: str, numbers: str, seen: str) -> str:
    """int64 [1]: the index of the deepest node that stands. A node stands if it and all its ancestors, the root
    excluded, are as `expected`.

    `tokens`, `expected` int64 [r]: of each node, and its parent's choice. `numbers` int64 [r]: 0 is the root. `seen`
    [r, r]: 0 where row i sees row j, itself or an ancestor.
    """
    wrong = g.op("Not", g.op("Equal", tokens, expected))
    # The root is no draft token; in a prompt chunk `forced_node` decides and none of this matters.
    wrong = g.op("And", wrong, g.op("Greater", numbers, g.integer(0)))
    ancestors = g.op("Cast", g.op("Equal", seen, g.number(0)), to=FLOAT)
    column = g.op("Unsqueeze", g.op("Cast", wrong, to=FLOAT), g.ints(1))
    mistakes = g.op("Squeeze", g.op("MatMul", ancestors, column), g.ints(1))
    depth = g.op("ReduceSum", ancestors, g.ints(1), keepdims=0)
    stands = g.op("Equal", mistakes, g.number(0))
    return g.op("ArgMax", g.op("Mul", depth, g.op("Cast", stands, to=FLOAT)), axis=0, keepdims=1)


def unless_forced(g: Scope, forced: str, otherwise: str) -> str:
    """int64: the input `forced` where it is 0 or more, else `otherwise`, of one shape."""
    return g.op("Where", g.op("GreaterOrEqual", forced, g.integer(0)), forced, otherwise)
