"""Buckets: reductions and gathers over one axis that share a collective.

A collective of a small tensor costs as much as one of a large one, nearly. So several go as one flat tensor:

* gradients, as they are made: a full bucket is reduced while the backward goes on. The sizes are DistributedDataParallel's
  (Li et al., PyTorch Distributed, VLDB 2020): a small first bucket, which starts early, then large ones. Sums of gradients that
  each micro-batch scatters, as with ZeRO 2, are added to a bucket later;
* parameters that are gathered where they are used, as with ZeRO 3: those of a block, while the block before it is computed
  (Zhao et al., PyTorch FSDP, VLDB 2023);
* the parameters that an update gathers at its end;
* small ones that stand side by side, as the sum and the count of a loss do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.blocks import block_of, is_parameter, reader_of
from autopar.ir import transfers
from autopar.ir.layout import span
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.runtime.lowering.collectives import own_row, start_scatter
from autopar.runtime.lowering.reduction import is_gathered
from autopar.torch_private import FUNCTIONAL, start_gather

FIRST, OTHERS = 2**20, 25 * 2**20  # bytes
SMALL = 2**16  # bytes, up to which an all-reduce joins its neighbours

Key = tuple[Any, Any, str, torch.dtype]  # transfer, axis or axes, op, dtype


SHARED = (transfers.all_reduce, transfers.reduce_scatter, transfers.all_gather)


def largest_pieces(explicit: Program) -> dict[str, int]:
    """Each reduction and gather → the bytes of its operand's largest piece: what fills a bucket must be the same number on every rank."""
    found = {}
    for node in explicit.nodes:
        if node.target in SHARED:
            type = record_of(operands(node)[0]).type
            assert isinstance(type, TensorType) and type.layout is not None
            mesh = type.layout.mesh
            first = dict.fromkeys(mesh.sizes, 0)
            held = math.prod(span(size, axes, mesh, first)[1] for size, axes in type.attr.parts(type.shape))
            found[node.name] = held * type.dtype.itemsize
    return found


def _is_widened(node: fx.Node) -> bool:
    return record_of(node).type.dtype in transfers.REDUCED_AS  # type: ignore[union-attr]


Stage = dict[Key, list[fx.Node]]  # buckets that start together


@dataclass
class Buckets:
    """What a phase reduces and gathers together.

    Attributes:
        bytes: each reduction and gather → what it puts into a bucket.
        due: value → the reductions of it that go into one, when it has been made.
        late: reductions of which nothing but a sum in donated memory is made, which can wait → that sum.
        runs: the first of some that stand side by side → all of them.
        ahead: gathers of parameters, a block's together, in the order in which blocks are computed; ``stage``: in which of them one is.
    """

    bytes: Mapping[str, int]
    due: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    late: dict[fx.Node, fx.Node] = field(default_factory=dict)
    runs: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    ahead: list[Stage] = field(default_factory=list)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    _begun: int = 0
    _open: dict[Key, list[fx.Node]] = field(default_factory=dict)
    _held: dict[Key, int] = field(default_factory=dict)
    _limit: dict[Key, int] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, nodes: Sequence[fx.Node], bytes: Mapping[str, int], sums: Collection[fx.Node] = ()) -> Buckets:
        """Of a phase's nodes. ``sums``: additions to donated memory."""
        found, own, output = Buckets(bytes), set(nodes), program.output
        runs: list[list[fx.Node]] = [[]]
        ahead = _Ahead(program, bytes)
        for node in nodes:
            operand = operands(node)[0] if node.name in bytes and _may_share(node) else None
            if operand is None:
                runs.append([])
            elif node.target is transfers.all_gather and record_of(node).phase != "update":
                ahead.add(node)
            elif operand in own and len(node.users) == 1 and next(iter(node.users)) in sums:
                found.late[node] = next(iter(node.users))
                found.due.setdefault(operand, []).append(node)
            elif operand in sums or (node.target is transfers.all_reduce and operand in own and set(node.users) == {output}):
                found.due.setdefault(operand, []).append(node)
            else:
                limit = OTHERS if node.target is transfers.all_gather else SMALL
                if bytes[node.name] > limit or (runs[-1] and (_key(node) != _key(runs[-1][0]) or operand in runs[-1])):
                    runs.append([])
                _put(runs, node, bytes, limit)
        found.runs = {run[0]: run for run in runs if len(run) > 1}
        found.ahead = ahead.stages
        found.stage = {node: k for k, stage in enumerate(ahead.stages) for some in stage.values() for node in some}
        return found

    def begin(self, stage: int) -> list[list[fx.Node]]:
        """The gathers up to a stage that have not begun."""
        found = [some for one in self.ahead[self._begun : stage + 1] for some in one.values()]
        self._begun = max(self._begun, stage + 1)
        return found

    @property
    def members(self) -> set[fx.Node]:
        """All that are in one, or will be."""
        return {node for some in (*self.due.values(), *self.runs.values(), self.stage) for node in some}

    def add(self, node: fx.Node) -> list[fx.Node]:
        """The members of the bucket that is full now, if one is."""
        key = _key(node)
        self._open.setdefault(key, []).append(node)
        self._held[key] = self._held.get(key, 0) + self.bytes[node.name]
        if self._held[key] < self._limit.get(key, FIRST):
            return []
        self._limit[key], self._held[key] = OTHERS, 0
        return self._open.pop(key)

    def rest(self) -> list[list[fx.Node]]:
        """The buckets that never filled."""
        left = list(self._open.values())
        self._open.clear()
        return left


class _Ahead:
    """Gathers of parameters, in the order in which they stand: those of a block together, or of several small ones."""

    def __init__(self, program: Program, bytes: Mapping[str, int]) -> None:
        self.bytes, self.block = bytes, block_of(program)
        self.stages: list[Stage] = []
        self._held = 0
        self._where: tuple[str, str] | None = None  # phase, block

    def add(self, node: fx.Node) -> None:
        where = record_of(node).phase, self.block(reader_of(node))
        gathered = self.bytes[node.name] * len(transfers.arguments(node.target, node.args, node.kwargs)["sizes"])
        same_phase = self._where is not None and self._where[0] == where[0]
        if not same_phase or self._held + gathered > OTHERS or (self._where != where and self._held >= FIRST):
            self.stages.append({})
            self._held = 0
        self._where = where
        self._held += gathered
        self.stages[-1].setdefault(_key(node), []).append(node)


def _may_share(node: fx.Node) -> bool:
    """Whether a transfer may be one of several: sums of one dtype, of pieces of one size; gathers of parameters."""
    given = transfers.arguments(node.target, node.args, node.kwargs)
    if node.target is transfers.all_gather and not is_parameter(operands(node)[0]) and record_of(node).phase != "update":
        return False
    kind = given.get("op", "sum")
    is_own = kind != "avg" and not is_gathered(kind, record_of(node).type.dtype)  # type: ignore[union-attr]
    return is_own and not _is_widened(node) and len(set(given.get("sizes") or ())) <= 1


def _put(buckets: list[list[fx.Node]], node: fx.Node, bytes: Mapping[str, int], limit: int) -> None:
    """Into the last bucket, unless that is full."""
    if not buckets or (buckets[-1] and sum(bytes[one.name] for one in buckets[-1]) + bytes[node.name] > limit):
        buckets.append([])
    buckets[-1].append(node)


def _key(node: fx.Node) -> Key:
    given, type = transfers.arguments(node.target, node.args, node.kwargs), record_of(node).type
    assert isinstance(type, TensorType)
    return node.target, given["axis"], given.get("op", "sum"), type.dtype


# -- what a bucket does: all its pieces are one flat tensor ------------------------------------------------------------


Place = tuple[tuple[int, ...], int, tuple[int, ...]]
"""Of a piece of a bucket, its shape with merged dims taken apart, the dim that is scattered or gathered, and the shape of the result;
a tuple of tuples, so that generated code can hold it."""


def start_bucket(pieces: list[torch.Tensor], op: str, group: str) -> torch.Tensor:
    return FUNCTIONAL.all_reduce_(torch.cat([piece.reshape(-1) for piece in pieces]), op, group)


def finish_bucket(started: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The members, as views of the one tensor."""
    flat = FUNCTIONAL.wait_tensor(started)
    return [piece.view(shape) for piece, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)]


def start_scatter_bucket(pieces: list[torch.Tensor], places: Sequence[Place], ranks: int, op: str, group: str) -> torch.Tensor:
    """A row for each rank, of its parts of all members."""
    rows = [
        torch.stack(piece.reshape(view).chunk(ranks, dim)).reshape(ranks, -1) if dim else piece.reshape(ranks, -1)
        for piece, (view, dim, _) in zip(pieces, places, strict=True)
    ]
    return start_scatter(torch.cat(rows, 1), op, group)


def finish_scatter_bucket(started: torch.Tensor, places: Sequence[Place], rank: int) -> list[torch.Tensor]:
    """The members, as views of the one tensor. ``rank``: of the group."""
    row = own_row(started, rank)
    return [piece.view(shape) for piece, (_, _, shape) in zip(row.split([math.prod(shape) for _, _, shape in places]), places, strict=True)]


def start_gather_bucket(pieces: list[torch.Tensor], ranks: int, group: str) -> torch.Tensor:
    return start_gather(torch.cat([piece.reshape(-1) for piece in pieces]).unsqueeze(0), ranks, group)


def finish_gather_bucket(started: torch.Tensor, places: Sequence[Place]) -> list[torch.Tensor]:
    rows = FUNCTIONAL.wait_tensor(started)  # [ranks, all pieces]
    columns = rows.split([math.prod(view) for view, _, _ in places], 1)
    return [
        torch.cat([piece.reshape(view) for piece in column.unbind()], dim).reshape(shape) if dim else column.reshape(shape)
        for column, (view, dim, shape) in zip(columns, places, strict=True)
    ]
