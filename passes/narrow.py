"""Compute a value in the pieces that its readers need, where its ranks would compute all of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.ops.seeded_random import is_seeded_random
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType
from autopar.passes.manager import Pass
from autopar.rules.binding import bind_node
from autopar.rules.strategies import Bound
from autopar.transitions import price


@dataclass(frozen=True)
class Narrow(Pass):
    """If all readers of a value need the same pieces of it, compute these, of the same pieces of the operands.

        m : bool[8 4 4] = le(a, b)                                 m : bool[8/dp 4 4] = le(a as [8/dp 4 4], b)
        y : f32[8/dp 4 4] = where(m as [8/dp 4 4], u, v)    →      y : f32[8/dp 4 4] = where(m, u, v)

    Layouts are propagated forwards, so what depends on no split input is whole at first, such as the attention mask of
    the whole batch: its work and memory would grow with the number of ranks. The pass works where pieces are cut
    without a transfer, moves no more bytes for the operands, and leaves random ops alone. It walks backwards, in linear
    time, so that whole chains change, in all phases: what the forward keeps for the backward becomes smaller.
    """

    name: ClassVar[str] = "narrow"
    takes: ClassVar[str] = "placed"
    gives: ClassVar[str] = "placed"

    def run(self, program: Program) -> None:
        changed: dict[fx.Node, Record] = {}
        needs: dict[fx.Node, set[Requirement | None]] = {}  # value → what its readers require, once all are seen
        for node in reversed(program.graph.nodes):
            record = record_of(node)
            if node.op == "call_function" and not is_getitem(node) and not is_seeded_random(node.target):
                narrowed = _narrowed(node, record, needs.get(node, set()))
                if narrowed is not None:
                    changed[node] = record = narrowed
            if node.op in ("call_function", "output"):
                for value, need in zip(operands(node), record.uses, strict=True):
                    needs.setdefault(value, set()).add(need)
        with program.edit() as edit:
            for node, record in changed.items():
                edit.annotate(node, type=record.type, uses=record.uses)


def _narrowed(node: fx.Node, record: Record, needs: Collection[Requirement | None]) -> Record | None:
    """Return the record of a value in the pieces that its readers need; ``None`` if it does not change."""
    have = record.type
    if not isinstance(have, TensorType) or have.layout is None or have.attr.pending:
        return None
    need = next(iter(needs)) if len(needs) == 1 else None
    if need is None or need.dtype != have.dtype or need.layout in (None, have.layout) or need.placed.attr.pending:
        return None
    new = replace(have, layout=need.placed)
    if price(have, new):
        return None
    bound, mesh = bind_node(node), need.placed.mesh
    attrs = bound.operands_before(need.placed.attr, mesh)
    if attrs is None or not _takes(bound, attrs, need.placed.attr, mesh):
        return None
    uses = list[Requirement | None]()
    for value, use, attr in zip(operands(node), record.uses, attrs, strict=True):
        source = record_of(value).type
        if use is None or not isinstance(source, TensorType):
            return None
        wanted = replace(use, layout=replace(use.placed, attr=attr))
        if _bytes(source, wanted) > _bytes(source, use):
            return None
        uses.append(wanted)
    return record._replace(type=new, uses=tuple(uses))


def _takes(bound: Bound, needs: Sequence[DistAttr], give: DistAttr, mesh: Mesh) -> bool:
    """Return whether the op accepts the pieces: some rules allow no empty ones."""
    return all(bound.takes(factor, dim, mesh) for factor, dim in bound.splits(needs, [give], mesh).items())


def _bytes(source: TensorType, use: Requirement) -> float:
    return price(source, replace(source, layout=use.placed))
