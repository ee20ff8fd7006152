"""Take the gradient of a parameter that several stages read apart into the parts of the stages.

    mm : f32[8 4] = mm(t, y)      stage 1                      stage 0                          stage 1
    embed : f32[8 4] = …          stage 0               →      w_grad_sum = add(w_grad, embed)  w_grad_sum = add(w_grad, mm)
    add : f32[8 4] = add.Tensor(embed, mm)
    w_grad_sum : f32[8 4] = add.Tensor(w_grad, add)

Each stage adds its part to a sum of its own, so that a whole gradient goes from stage to stage once a step, and not once
for each micro-batch. Views and casts of such an addition are applied to each part.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.nodes import is_getitem, operands
from autopar.rules.registry import rule_of
from autopar.torch_private import aten

ADD, CAST = aten.add.Tensor, aten._to_copy.default


@dataclass(frozen=True)
class Part:
    """A part of a gradient: a value of one stage, or an addition, view or cast of such parts.

    Attributes:
        node: the value, or the op that is applied to ``of``.
        of: the parts that the op reads; empty for a value.
    """

    node: fx.Node
    of: tuple[Part, ...] = ()


def gradient_parts(gradient: fx.Node, stage: Mapping[fx.Node, int], dissolved: set[fx.Node]) -> dict[int, Part]:
    """Return the parts of a gradient by stage.

    Args:
        stage: op → its stage.
        dissolved: receives the ops that no stage runs as a whole.
    """
    parts: dict[fx.Node, dict[int, Part]] = {}
    open_ = [gradient]
    while open_:
        node = open_[-1]
        inner = _parts_of(node)
        if missing := [value for value in inner if value not in parts]:
            open_ += missing
            continue
        open_.pop()
        parts[node] = _joined(node, [parts[value] for value in inner], stage, dissolved)
    return parts[gradient]


def _parts_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a gradient adds up, or passes on; nothing for any other op."""
    if node.op != "call_function" or is_getitem(node) or len(node.users) > 1:
        return []
    read = operands(node)
    adds = node.target is ADD and len(read) == 2 and not node.kwargs and read[0] is not read[1]
    passes = len(read) == 1 and (node.target is CAST or rule_of(node.target).view)
    return read if adds or passes else []


def _joined(
    node: fx.Node, operand_parts: list[dict[int, Part]], stage: Mapping[fx.Node, int], dissolved: set[fx.Node]
) -> dict[int, Part]:
    stages = sorted({at for parts in operand_parts for at in parts})
    if len(stages) < 2:
        return {stage.get(node, 0): Part(node)}
    dissolved.add(node)
    joined = {}
    for at in stages:
        own = tuple(parts[at] for parts in operand_parts if at in parts)
        joined[at] = own[0] if node.target is ADD and len(own) == 1 else Part(node, own)
    return joined


def emit(
    part: Part, values: Mapping[fx.Node, fx.Node], copy: Callable[[fx.Node, Mapping[fx.Node, fx.Node]], fx.Node]
) -> fx.Node:
    """Write the ops of a part, and return its value.

    Args:
        values: the values of its stage.
        copy: writes a copy of an op on other operands.
    """
    if not part.of:
        return values[part.node]
    made = [emit(inner, values, copy) for inner in part.of]
    return copy(part.node, dict(zip(operands(part.node), made, strict=True)))
