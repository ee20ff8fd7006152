"""Cut collectives into chunks: which elements of a rank's piece each chunk sends, and the type of a chunk.

A schedule cuts by bytes of the largest piece. Each rank cuts its own piece in the same proportions, which are equal
within a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, tensor_type
from autopar.ir.record import TensorType
from autopar.scheduling.lines import Part
from autopar.scheduling.programs.function_lines import FunctionLines

Span = tuple[int, int]  # the first element, and the one behind the last


def cuts_of(functions: Iterable[FunctionLines], nodes: Mapping[str, fx.Node]) -> dict[fx.Node, dict[Part, Span]]:
    """Return for each collective that is sent in several parts: part → the elements of this rank's piece.

    A part without elements is left out.

    Args:
        functions: the lines of the schedule.
        nodes: name → node of the rank's program.
    """
    parts: dict[str, list[Part]] = {}
    for function in functions:
        for line in function.lines:
            if line.kind == "start":
                for part in line.parts:
                    parts.setdefault(part.op, []).append(part)
    return {nodes[name]: _cut(nodes[name], own) for name, own in parts.items() if len(own) > 1 and name in nodes}


def _cut(node: fx.Node, parts: list[Part]) -> dict[Part, Span]:
    """Return part of a collective → the elements that it sends; at least one part is left."""
    total, elements = max(part.end for part in parts), _elements_sent(node)
    spans = {part: (part.begin * elements // total, part.end * elements // total) for part in parts}
    return {part: span for part, span in spans.items() if span[0] < span[1]} or {parts[0]: (0, 0)}


def _elements_sent(node: fx.Node) -> int:
    """Return the elements that a chunk of a collective is cut from: of its operand, or of each row of a scatter."""
    kept = tensor_type(node) if node.target is transfers.reduce_scatter else tensor_type(operands(node)[0])
    return math.prod(kept.shape)


def chunk_type(node: fx.Node, span: Span) -> TensorType:
    """Return the type of a chunk of a collective: its elements in a row, of a gather a row for each rank."""
    type = tensor_type(node)
    rows = () if node.target is not transfers.all_gather else (len(node.kwargs["sizes"]),)  # type: ignore[arg-type]
    return TensorType((*rows, span[1] - span[0]), type.dtype)
