"""What the program knows of a node: one frozen record each.

Records are replaced and never mutated, because FX's own passes copy ``node.meta`` by reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from autopar.ir.layout import DistAttr, Layout, layout_of
from autopar.ir.mesh import Mesh

DTYPES: dict[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

PHASES = ("forward", "backward", "update")
ROLES = ("input", "param", "buffer", "tangent", "seed", "state")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, dtype and Layout of a tensor value.

    The shape is the global one, except at the levels ``local`` and ``scheduled``, where it is that of the rank's piece
    and there is no Layout. At the level ``traced`` a Layout is a constraint, and most values have none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None = None

    @property
    def attr(self) -> DistAttr:
        """The distributed attribute; replicated where none is given."""
        return DistAttr.replicated(len(self.shape)) if self.layout is None else self.layout.attr


ValueType = TensorType | tuple[TensorType | None, ...] | None


@dataclass(frozen=True, slots=True)
class Requirement:
    """What an op asks of an operand. At the level ``traced`` that is a dtype alone."""

    layout: Layout | None
    dtype: torch.dtype


@lru_cache(maxsize=65536)
def requirement_of(mesh: Mesh, attr: DistAttr, dtype: torch.dtype) -> Requirement:
    """The same object for the same requirement: a program has thousands of operands, and few kinds of them."""
    return Requirement(layout_of(mesh, attr), dtype)


@dataclass(frozen=True, slots=True)
class Result:
    """What one argument of the output node is: a ``return``, the ``grad`` or the next ``state`` of a placeholder."""

    kind: str
    of: str = ""


class Call(NamedTuple):
    """One call of an op by the model: the nodes that capture made of it, and of its backward, have it in common.

    Attributes:
        number: in the order in which forward made them.
        op: as it was called, ``aten::mse_loss``, before it was taken apart.
    """

    number: int
    op: str


class Record(NamedTuple):
    """All that is known of one node; a tuple, because every inserted op needs one.

    Attributes:
        type: the value's type; a tuple for ops with several results, ``None`` for the output node.
        uses: one requirement for each operand occurrence, in argument order (``None`` for a tuple operand);
            empty for transfers, which take what they are given, and at levels without requirements. At the level ``traced``,
            ``None`` for operands that are taken as they are, and empty where all are.
        phase: ``forward``, ``backward`` or ``update``.
        role: of placeholders, one of ``input param buffer tangent seed state``.
        index: of tangents, the position of their value among those returned.
        name: of placeholders, the user's name (``up.weight``) where it is not the node's.
        results: of the output node, what each argument is.
        stream: at the level ``scheduled``, the stream the op runs on (``None``: compute).
        started: at the level ``scheduled``, a collective that only starts and needs a ``wait``.
        module: path of the module that ran the op ("" is the root); a comment, outside equality.
        source: the user's line, ``model.py:41  self.act(self.up(x))``; a comment, outside equality.
        call: of what capture made, the call that it is part of; a comment, outside equality.
    """

    type: ValueType
    uses: tuple[Requirement | None, ...] = ()
    phase: str = "forward"
    role: str = ""
    index: int | None = None
    name: str = ""
    results: tuple[Result, ...] = ()
    stream: str | None = None
    started: bool = False
    module: str = ""
    source: str = ""
    call: Call | None = None

    @property
    def meaning(self) -> tuple[object, ...]:
        """The record without its comments: what equality of programs compares."""
        return (
            self.type, self.uses, self.phase, self.role, self.index, self.name, self.results, self.stream, self.started,
        )  # fmt: skip
