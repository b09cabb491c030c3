"""Outputs that are a tensor, or tuples and lists of tensors."""

MOST_LEAVES = 1000


def flatten(value: object) -> tuple[str, list]:
    """The nesting as text, in which tuples and lists are the same, and what lies in it, in order.

    Raises:
        RecursionError: a list holds itself.
        ValueError: more than MOST_LEAVES lie in it.
    """
    if not isinstance(value, (list, tuple)):
        return "*", [value]
    shapes, leaves = [], []
    for part in value:
        shape, found = flatten(part)
        shapes.append(shape)
        leaves += found
        if len(leaves) > MOST_LEAVES:
            raise ValueError(f"more than {MOST_LEAVES} outputs")
    return f"[{', '.join(shapes)}]", leaves
