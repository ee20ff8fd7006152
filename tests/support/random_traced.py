"""Write small random traced programs: products, sums, additions, views and casts, in a forward and a backward."""

from __future__ import annotations

import random

Typed = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def random_traced(draw: random.Random, ops: int, shape: tuple[int, ...]) -> str:
    """The lines of a program: a parameter with its gradient, and one or two results, of which the last has a tangent.

    ``shape``: of the parameter and the input, ``(8, 8)`` or ``(8,)``.
    """
    values: list[Typed] = [("w", "f32", shape), ("x", draw.choice(["f32", "f32", "bf16"]), shape)]
    head = [f"  {name} : {typed(dtype, sizes)} = {role}" for (name, dtype, sizes), role in
            zip(values, ("param", "input"), strict=True)]  # fmt: skip
    forward = draw.randint(1, ops)
    lines = ["forward:"]
    for k in range(forward):
        lines.append(random_op(draw, f"v{k}", values))
    made = [value for value in values if value[0].startswith("v")]
    returned = [made[-1]] + ([draw.choice(made)] if draw.random() < 0.4 else [])
    if ops > forward:
        _, dtype, sizes = returned[0]
        head.append(f"  d_out : {typed(dtype, sizes)} = tangent(0)")
        values.append(("d_out", dtype, sizes))
        lines.append("backward:")
        for k in range(forward, ops):
            lines.append(random_op(draw, f"v{k}", values, latest=draw.random() < 0.6))
    names = [name for name, _, _ in returned]
    lines.append(f"  return {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}")
    gradients = [value for value in values if value[2] == shape and value[0].startswith("v")]
    if gradients and ops > forward:
        name, dtype, _ = gradients[-1]
        lines.append(f"  grad w = {name}{'' if dtype == 'f32' else ' as f32'}")
    return "\n".join([*head, *lines])


def random_op(draw: random.Random, name: str, values: list[Typed], latest: bool = True) -> str:
    """A line, whose value is added to ``values``; it reads one of the latest ones, if it may."""
    first = values[-1] if latest and draw.random() < 0.7 else draw.choice(values)
    source, dtype, shape = first
    alike = [value for value in values if value[2] == shape]
    kinds = ["relu", "add", "add", "view", "sum", "cast"] + (["mm", "mm", "mm", "t"] if shape == (8, 8) else [])
    match draw.choice(kinds):
        case "add" | "mm" as kind:
            other, other_dtype, _ = draw.choice(alike)
            wider = "f32" if "f32" in (dtype, other_dtype) else "bf16"
            operands = [v if d == wider else f"{v} as {wider}" for v, d in ((source, dtype), (other, other_dtype))]
            made, call = (wider, shape), f"{'mm' if kind == 'mm' else 'add.Tensor'}({', '.join(operands)})"
        case "view" if shape[:1] == (8,) and len(shape) < 3:
            sizes = (4, 2, *shape[1:])
            made, call = (dtype, sizes), f"view({source}, {list(sizes)})"
        case "sum" if shape:
            made, call = (dtype, shape[1:]), f"sum.dim_IntList({source}, [0])"
        case "cast":
            to = "bf16" if dtype == "f32" else "f32"
            made, call = (to, shape), f"neg({source} as {to})"
        case "t":
            made, call = (dtype, shape), f"t({source})"
        case _:
            made, call = (dtype, shape), f"relu({source})"
    values.append((name, *made))
    return f"  {name} : {typed(*made)} = {call}"


def typed(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{' '.join(map(str, shape))}]"
