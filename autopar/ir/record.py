"""Define the record of a node: its type, requirements, phase and role, in one frozen tuple.

A record is replaced and never mutated, because FX's own passes copy ``node.meta`` by reference.
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

# ``weight_gradients``: those that a pipeline computes apart from the rest of the backward;
# ``reduction``: what an update computes before numbers go over all stages of a pipeline
PHASES = ("finish", "forward", "backward", "weight_gradients", "update")
ROLES = ("input", "param", "buffer", "tangent", "seed", "state")


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape, dtype and Layout of a tensor value.

    The shape is the global one. At the levels ``local`` and ``scheduled`` it is that of the rank's piece,
    and there is no Layout. At the level ``traced`` a Layout is a constraint, and most values have none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None = None

    @property
    def attr(self) -> DistAttr:
        """The distributed attribute; replicated if there is no Layout."""
        return DistAttr.replicated(len(self.shape)) if self.layout is None else self.layout.attr

    @property
    def placed(self) -> Layout:
        """The Layout, where the level says that there is one."""
        assert self.layout is not None
        return self.layout

    @property
    def mesh(self) -> Mesh:
        """The mesh of the Layout, where the level says that there is one."""
        return self.placed.mesh


ValueType = TensorType | tuple[TensorType | None, ...] | None


@dataclass(frozen=True, slots=True)
class Requirement:
    """The Layout and dtype that an op requires of an operand; at the level ``traced`` only a dtype."""

    layout: Layout | None
    dtype: torch.dtype

    @property
    def placed(self) -> Layout:
        """The Layout, where the level says that there is one."""
        assert self.layout is not None
        return self.layout


@lru_cache(maxsize=65536)
def requirement_of(mesh: Mesh, attr: DistAttr, dtype: torch.dtype) -> Requirement:
    """Return a requirement, the same object for equal arguments.

    A program has thousands of operands, and few kinds of them.
    """
    return Requirement(layout_of(mesh, attr), dtype)


@dataclass(frozen=True, slots=True)
class Result:
    """The role of one argument of the output node.

    It is a ``return``, or the ``grad`` or next ``state`` of the placeholder ``of``.
    """

    kind: str
    of: str = ""


class Call(NamedTuple):
    """One call of an op by the model. The nodes that capture made for it, and for its backward, share one ``Call``.

    Attributes:
        number: the position in the order of calls in forward.
        op: the op that was called, ``aten::mse_loss``, before its decomposition.
    """

    number: int
    op: str


class Record(NamedTuple):
    """All facts about one node. It is a tuple, which is cheap to make: every inserted op needs one.

    Attributes:
        type: the value's type; a tuple for ops with several results, ``None`` for the output node.
        uses: one requirement for each operand occurrence, in argument order (``None`` for a tuple operand);
            empty for transfers, which accept any Layout, and at levels without requirements. At the level ``traced``,
            ``None`` for operands whose dtype is not converted, and empty if none is.
        phase: ``forward``, ``backward`` or ``update``; ``weight_gradients`` and ``reduction``, the parts of a
            backward and of an update that a pipeline runs apart; or ``finish``, where a step first completes the one
            before.
        role: the role of a placeholder, one of ``input param buffer tangent seed state``.
        index: of tangents, the position of their value among the returned ones.
        name: the user's name of a placeholder (``up.weight``), if it is not the node's name.
        results: for the output node, the role of each argument.
        stream: at the level ``scheduled``, the stream the op runs on (``None``: compute).
        started: at the level ``scheduled``, whether this collective only starts and needs a ``wait``. A state is
            started if the run before has started it; then its next value is the start of the same collective.
        message: of a started collective, the name of the message that it shares with the starts beside it; empty if it
            has one of its own.
        span: of a started collective, the first element of its operand that it sends and the one behind the last, if it
            sends a chunk; of a reduce-scatter, those of each row, of the elements that one rank keeps.
        module: path of the module that ran the op ("" is the root); a comment, not compared.
        source: the user's line, ``model.py:41  self.act(self.up(x))``; a comment, not compared.
        call: the model's call that this node is part of; a comment, not compared.
    """

    type: ValueType
    uses: tuple[Requirement | None, ...] = ()
    phase: str = "forward"
    role: str = ""
    index: int | None = None  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    name: str = ""
    results: tuple[Result, ...] = ()
    stream: str | None = None
    started: bool = False
    message: str = ""
    span: tuple[int, int] | None = None
    module: str = ""
    source: str = ""
    call: Call | None = None

    @property
    def meaning(self) -> tuple[object, ...]:
        """The record without its comments: what equality of programs compares."""
        return (
            self.type, self.uses, self.phase, self.role, self.index, self.name, self.results, self.stream, self.started,
            self.message, self.span,
        )  # fmt: skip
