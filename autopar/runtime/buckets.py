"""Buckets: all-reduces over one axis that share a collective.

A collective of a small tensor costs as much as one of a large one, nearly. So those that only leave the step, as
gradients do, are gathered as they are made, and a full bucket is reduced as one flat tensor while the backward goes on.
The sizes are DistributedDataParallel's (Li et al., PyTorch Distributed, VLDB 2020): a small first bucket, which starts
early, then large ones. And small ones that stand side by side, as the sum and the count of a loss do, are one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar import transfers
from autopar.layout import span
from autopar.program import Program, operands, record_of
from autopar.record import TensorType
from autopar.torch_private import FUNCTIONAL

FIRST, OTHERS = 2**20, 25 * 2**20  # bytes
SMALL = 2**16  # bytes, up to which an all-reduce joins its neighbours

Key = tuple[Any, str, torch.dtype]  # axis or axes, op, dtype


def largest_pieces(explicit: Program) -> dict[str, int]:
    """Each all-reduce → the bytes of its largest piece: what fills a bucket must be the same number on every rank."""
    found = {}
    for node in explicit.nodes:
        if node.target is transfers.all_reduce:
            type = record_of(operands(node)[0]).type
            assert isinstance(type, TensorType) and type.layout is not None
            mesh = type.layout.mesh
            first = dict.fromkeys(mesh.sizes, 0)
            held = math.prod(span(size, axes, mesh, first)[1] for size, axes in type.attr.parts(type.shape))
            found[node.name] = held * type.dtype.itemsize
    return found


def _is_widened(node: fx.Node) -> bool:
    return record_of(node).type.dtype in transfers.REDUCED_AS  # type: ignore[union-attr]


@dataclass
class Buckets:
    """What a phase reduces together.

    Attributes:
        bytes: each all-reduce → what it puts into a bucket.
        due: value → the all-reduces of it that go into one, when it has been made.
        runs: the first of some that stand side by side → all of them.
    """

    bytes: Mapping[str, int]
    due: dict[fx.Node, list[fx.Node]]
    runs: dict[fx.Node, list[fx.Node]]
    _open: dict[Key, list[fx.Node]] = field(default_factory=dict)
    _held: dict[Key, int] = field(default_factory=dict)
    _limit: dict[Key, int] = field(default_factory=dict)

    @staticmethod
    def of(program: Program, nodes: Sequence[fx.Node], bytes: Mapping[str, int]) -> Buckets:
        """For the all-reduces among a phase's nodes: those whose results nothing but the caller reads, and small neighbours."""
        own, output = set(nodes), program.output
        due: dict[fx.Node, list[fx.Node]] = {}
        runs: list[list[fx.Node]] = [[]]
        for node in nodes:
            alone = node.target is not transfers.all_reduce or node.name not in bytes or node.kwargs.get("op") == "avg" or _is_widened(node)
            operand = None if alone else operands(node)[0]
            if operand in own and set(node.users) == {output}:
                due.setdefault(operand, []).append(node)  # type: ignore[arg-type]
            elif alone or bytes[node.name] > SMALL:
                runs.append([])
            elif runs[-1] and (_key(node) != _key(runs[-1][0]) or operand in runs[-1]):
                runs.append([node])
            else:
                runs[-1].append(node)
        return Buckets(bytes, due, {run[0]: run for run in runs if len(run) > 1})

    @property
    def members(self) -> set[fx.Node]:
        """All that are in one, or will be."""
        return {node for some in (*self.due.values(), *self.runs.values()) for node in some}

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


def _key(node: fx.Node) -> Key:
    given, type = transfers.arguments(node.target, node.args, node.kwargs), record_of(node).type
    assert isinstance(type, TensorType)
    return given["axis"], given.get("op", "sum"), type.dtype


def start_bucket(pieces: list[torch.Tensor], op: str, group: str) -> torch.Tensor:
    return FUNCTIONAL.all_reduce_(torch.cat([piece.reshape(-1) for piece in pieces]), op, group)


def finish_bucket(started: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The members, as views of the one tensor."""
    flat = FUNCTIONAL.wait_tensor(started)
    return [piece.view(shape) for piece, shape in zip(flat.split([math.prod(shape) for shape in shapes]), shapes, strict=True)]
