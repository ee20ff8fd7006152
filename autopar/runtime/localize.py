"""Localize an explicit program: write it in the shapes of one rank's pieces.

    explicit                                                      local at dp=0 tp=1
    h : f32[32/dp 256/tp] = relu(mm)                       →      h : f32[16 128] = relu(mm)
    y : f32[32/dp 256] = all_gather(h, 1, tp)              →      y : f32[16 256] = all_gather(h, 1, tp, sizes=[128, 128])

Size arguments become those of the piece, and transfers get explicit piece sizes. Ranks whose pieces have equal sizes
share a program (a *class*); their coordinates, in which they differ, are an input at run time. A send and a recv
become one exchange at the line of the recv, so that all ranks of both stages run the exchanges in the order of the
program.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar.gc_pause import gc_paused
from autopar.ir import transfers
from autopar.ir.boxes import spans
from autopar.ir.layout import Axes, span
from autopar.ir.mesh import Mesh
from autopar.ir.messages import axes_between, messages
from autopar.ir.nodes import make_node, map_operands, operands, record_of, set_record, tensor_type
from autopar.ir.ops.over_stages import OVER_STAGES
from autopar.ir.ops.seeded_random import is_seeded_random
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType, ValueType
from autopar.rules.binding import bind_node
from autopar.rules.registry import rule_of
from autopar.scheduling.programs.apply import scheduled
from autopar.scheduling.programs.functions import sends_nothing
from autopar.scheduling.programs.order import Order
from autopar.torch_private import OpOverload
from autopar.verify.channels.classes import RankClass, check_classes


def rank_classes(program: Program) -> list[list[int]]:
    """Group the ranks of the program's mesh by their stages and by equal piece sizes: ``[[0, 1], [2, 3]]``."""
    mesh = _mesh(program)
    splits: dict[tuple[Mesh, int, tuple[str, ...]], None] = {}
    for node in program.nodes:
        types = record_of(node).type
        for type in types if isinstance(types, tuple) else (types,):
            if type is not None and type.layout is not None:
                for size, axes in type.attr.parts(type.shape):
                    for end in range(1, len(axes) + 1):
                        splits[type.layout.mesh, size, axes[:end]] = None
    uneven = [(on, size, axes) for on, size, axes in splits if size % on.count(axes)]
    stages = {frozenset(stage.ranks) for stage in program.stages.values()}
    columns = [_lengths(mesh, on, size, axes) for on, size, axes in uneven]
    columns += [np.fromiter((rank in ranks for rank in mesh.ranks), np.int64, mesh.size) for ranks in stages]
    if not columns:
        return [list(mesh.ranks)]
    classes: dict[bytes, list[int]] = {}
    for rank, row in zip(mesh.ranks, np.stack(columns, axis=1), strict=True):
        classes.setdefault(row.tobytes(), []).append(rank)
    return list(classes.values())


def _lengths(mesh: Mesh, on: Mesh, size: int, axes: tuple[str, ...]) -> np.ndarray:
    """Return the length of each rank's piece of a dim that is split on a mesh; -1 for ranks that are not on it."""
    lengths = np.broadcast_to(spans(size, axes, on)[1], on.shape).ravel()
    if on.ranks == mesh.ranks:
        return lengths
    there = dict(zip(on.ranks, lengths.tolist(), strict=True))
    return np.array([there.get(rank, -1) for rank in mesh.ranks])


SHARED = (
    "this local program is made from the explicit one, and an edit of it would not reach all other ranks; "
    "edit the explicit program before it is localized, or a copy of this one, program.copy()"
)


class LocalPrograms(Mapping[int, Program]):
    """The local programs of an explicit program, by rank. They are made on first use, one per class of ranks.

    Args:
        check: called with each local program when it has been made.
        order: the order in which they run; with it, the programs are *scheduled*.
        classes: the ranks of each class, where they are known.

    Raises:
        ChannelError: ranks would meet in different collectives, or wait forever; raised on first use.
    """

    def __init__(
        self, program: Program, check: Callable[[Program], None], order: Order | None = None,
        classes: list[list[int]] | None = None,
    ) -> None:  # fmt: skip
        self.program, self._check, self.order = program, check, order
        self._classes = rank_classes(program) if classes is None else classes
        self._class_of = {rank: k for k, ranks in enumerate(self._classes) for rank in ranks}
        self._made: dict[int, Program] = {}

    def __getitem__(self, rank: int) -> Program:
        """Return the program with the coordinates of ``rank`` and the graph of its class.

        ``ValueError`` if the rank is not on the mesh.
        """
        at = _mesh(self.program).coordinates(rank)
        number = self._class_of[rank]
        if number not in self._made:
            self._make()
        program = self._made[number].at(at)
        program.fixed = SHARED
        return program

    @property
    def ranks_of_classes(self) -> list[list[int]]:
        """The ranks of each class."""
        return self._classes

    @property
    def every_class(self) -> Collection[Program]:
        """One program of each class of ranks."""
        if not self._made:
            self._make()
        return self._made.values()

    @property
    def classes(self) -> list[RankClass]:
        """The classes of ranks, each with the program of its first rank."""
        if not self._made:
            self._make()
        return self._classed()

    def _classed(self) -> list[RankClass]:
        return [RankClass(self._made[k], ranks) for k, ranks in enumerate(self._classes)]

    def _make(self) -> None:
        """Localize all classes: the check for deadlocks needs all classes together."""
        mesh = _mesh(self.program)
        with gc_paused():
            self._made = {k: self._of_class(mesh.coordinates(ranks[0])) for k, ranks in enumerate(self._classes)}
            for program in self._made.values():
                self._check(program)
            check_classes(self._classed())

    def _of_class(self, coordinates: Mapping[str, int]) -> Program:
        local = localize(self.program, coordinates)
        return local if self.order is None else scheduled(local, self.order.functions, self.order.across)

    def __iter__(self) -> Iterator[int]:
        return iter(self._class_of)

    def __len__(self) -> int:
        return len(self._class_of)


def localize(program: Program, coordinates: Mapping[str, int]) -> Program:
    """Return the program of the rank at ``coordinates``; linear in the graph.

    For a program with stages, it has the ops of the rank's stages, and the rank's part of each exchange between stages.

    Raises:
        ValueError: the program is not explicit.
    """
    if program.level != "explicit":
        raise ValueError(f"localize takes an explicit program, and this one is {program.level}")
    rank = _mesh(program).rank(coordinates)
    return _Localizer(program, rank).run(coordinates)


def _mesh(program: Program) -> Mesh:
    if program.mesh is None:
        raise ValueError("localize takes a program on a mesh")
    return program.mesh


class _Localizer:
    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}  # only the values that this rank has
        self.names = {node.name for node in program.nodes}
        self.seeds: dict[tuple[str, ...], fx.Node] = {}  # axes → the seed of a piece along them

    def run(self, coordinates: Mapping[str, int]) -> Program:
        for node in self.program.nodes:
            self.node(node)
        tree = self.program.tree
        if (count := sum(r.kind == "return" for r in record_of(self.program.output).results)) != (
            left := self.returned
        ):
            tree = () if not left else ("(", *[", "] * (left - 1), ",)" if left == 1 else ")")
            assert left < count
        return Program(self.graph, "local", self.program.mesh, stages=self.program.stages, coordinates=coordinates,
                       tree=tree, constants=self.program.constants)  # fmt: skip

    def node(self, node: fx.Node) -> None:
        record = record_of(node)
        if node.op == "output":
            self.output(node, record)
            return
        mesh = _mesh_of(record.type) or self.program.mesh
        assert mesh is not None
        if node.target is transfers.send:
            if (operand := operands(node)[0]) in self.nodes:
                self.nodes[node] = self.nodes[operand]  # each recv sends it
            return
        if node.target is transfers.recv:
            self.exchange(node, record, mesh)
            return
        if self.rank not in mesh:
            return
        at = mesh.coordinates(self.rank)
        kind = _local_type(record.type, mesh, at)
        args, kwargs = node.args, dict(node.kwargs)
        if sends_nothing(node.target, record.type):
            assert isinstance(kind, TensorType)
            args, kwargs = (operands(node)[0], list(kind.shape)), {}
            self.add(node, record, node.op, torch.ops.aten.new_zeros.default, args, kwargs, kind)
            return
        if node.target is OVER_STAGES:  # it adds the numbers that the rank has
            args = ([value for value in operands(node) if value in self.nodes], *node.args[1:])
        elif node.target in transfers.BY_FUNCTION:
            args, kwargs = _transfer(node, mesh, at)
            if mesh.name is not None and "axis" in transfers.arguments(node.target, args, kwargs):
                kwargs["stage"] = mesh.name
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            args = _sizes(node, record, kind, mesh, at)
        if is_seeded_random(node.target):
            self.drawn(node, record, args, kwargs, kind)
        else:
            self.add(node, record, node.op, node.target, args, kwargs, kind)

    def drawn(self, node: fx.Node, record: Record, args: Any, kwargs: Any, kind: ValueType) -> None:
        """Let a random op whose result is split draw from a separate seed for each piece."""
        seed = node.kwargs["seed"]
        assert isinstance(seed, fx.Node)
        of_all = self.nodes[seed]
        if axes := _split_over(record.type) if not tensor_type(of_all).shape else ():
            if axes not in self.seeds:
                name = "_".join([seed.name, *axes])
                while name in self.names:
                    name += "_"
                self.names.add(name)
                new = make_node(
                    self.graph,
                    name,
                    "call_function",
                    transfers.fold_in,
                    (of_all, axes if len(axes) > 1 else axes[0]),
                    {},
                )
                set_record(
                    new, Record(record_of(of_all).type, phase=record.phase, module=record.module, source=record.source)
                )
                self.seeds[axes] = new
            self.nodes[seed] = self.seeds[axes]
        self.add(node, record, node.op, node.target, args, kwargs, kind)
        self.nodes[seed] = of_all

    def add(self, node: fx.Node, record: Record, op: str, target: Any, args: Any, kwargs: Any, kind: ValueType) -> None:
        new = make_node(self.graph, node.name, op, target,
                        map_operands(args, self.nodes.__getitem__),
                        map_operands(kwargs, self.nodes.__getitem__))  # fmt: skip
        self.nodes[node] = new
        set_record(new, Record(kind, (), record.phase, record.role, record.index, record.name, record.results,
                               module=record.module, source=record.source, call=record.call))  # fmt: skip

    def output(self, node: fx.Node, record: Record) -> None:
        """Return the results that this rank has."""
        present = [
            (value, result) for value, result in zip(operands(node), record.results, strict=True) if value in self.nodes
        ]
        self.returned = sum(result.kind == "return" for _, result in present)
        args = node.args if len(present) == len(record.results) else (tuple(value for value, _ in present),)
        self.add(
            node, record._replace(results=tuple(result for _, result in present)), "output", node.target, args, {}, None
        )

    def exchange(self, node: fx.Node, record: Record, target_mesh: Mesh) -> None:
        """Add a send if the rank is only on the source's stage; else a recv.

        The recv also sends if the rank is on both.
        """
        (sent,) = operands(node)
        source, result = record_of(sent).type, record.type
        assert isinstance(source, TensorType) and source.layout is not None and isinstance(result, TensorType)
        source_mesh = source.layout.mesh
        if self.rank not in source_mesh and self.rank not in target_mesh:
            return
        target = transfers.recv if self.rank in target_mesh else transfers.send
        mesh = target_mesh if target is transfers.recv else source_mesh
        kwargs = {
            **_splits(result, "splits", "parts"),
            "shape": source.shape,
            **_splits(source, "source", "source_parts"),
            "home": source_mesh.name,
        }
        args = (sent if self.rank in source_mesh else None, target_mesh.name)
        kind = _local_type(result if target is transfers.recv else source, mesh, mesh.coordinates(self.rank))
        self.add(node, record, "call_function", target, args, kwargs, kind)
        if target is transfers.send:
            del self.nodes[node]  # the result is on other ranks


def _split_over(type: ValueType) -> tuple[str, ...]:
    """Return the axes that split the first result."""
    first = type[0] if isinstance(type, tuple) else type
    assert isinstance(first, TensorType)
    split = {axis for dim in first.attr.dims for _, axes in dim for axis in axes}
    return tuple(axis for axis in (first.layout.mesh.names if first.layout else ()) if axis in split)


def _mesh_of(type: ValueType) -> Mesh | None:
    first = next((t for t in type if t is not None), None) if isinstance(type, tuple) else type
    return None if first is None or first.layout is None else first.layout.mesh


def _splits(type: TensorType, name: str, parts_name: str) -> dict[str, Any]:
    splits, parts = transfers.flat_splits(type.attr, type.shape)
    return {name: splits} if parts is None else {name: splits, parts_name: parts}


def _local_type(type: ValueType, mesh: Mesh, at: Mapping[str, int]) -> ValueType:
    if isinstance(type, tuple):
        return tuple(_local_part(part, mesh, at) for part in type)
    return _local_part(type, mesh, at)


def _local_part(type: TensorType | None, mesh: Mesh, at: Mapping[str, int]) -> TensorType | None:
    if type is None:
        return None
    return TensorType(type.attr.local_shape(type.shape, mesh, at), type.dtype)


def _sizes(node: fx.Node, record: Record, kind: ValueType, mesh: Mesh, at: Mapping[str, int]) -> tuple[Any, ...]:
    """Return the op's arguments with the size arguments, which its rule names, replaced by local sizes."""
    rule = rule_of(node.target)
    if not rule.sizes:
        return node.args
    # some may be absent
    result = next(part for part in (kind if isinstance(kind, tuple) else (kind,)) if isinstance(part, TensorType))
    factors = _factors(node, record, mesh, at) if rule.counts_factors else {}
    return rule.resized(node.args, result.shape, factors)


def _factors(node: fx.Node, record: Record, mesh: Mesh, at: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each factor of the op on the rank at ``at``."""
    bound = bind_node(node)
    types = record.type if isinstance(record.type, tuple) else (record.type,)
    needs = [tensor_type(value).attr for value in operands(node)]
    return bound.local_sizes(
        bound.splits(needs, [None if type is None else type.attr for type in types], mesh), mesh, at
    )


def _transfer(node: fx.Node, mesh: Mesh, at: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the transfer's arguments with explicit sizes of pieces, and of the local parts of merged dims."""
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    operand = operands(node)[0]
    source, result = record_of(operand).type, record_of(node).type
    assert isinstance(source, TensorType) and isinstance(result, TensorType)
    if node.target is transfers.redistribute:
        return transfers.call(node.target, operand, _redistributed(source, result))
    if arguments.get("dim", arguments.get("source")) is None:
        return node.args, dict(node.kwargs)
    parts, axis = arguments.get("parts"), arguments["axis"]
    splits = [axes for dim in transfers.split_parts(source.attr, source.shape, mesh, parts, axis) for axes in dim]
    sizes = [n for dim in parts for n in dim] if parts else list(source.shape)

    def pieces(place: int, *more: str) -> list[int]:
        return list(_pieces(sizes[place], (*splits[place], *more), mesh, axis, tuple(at.items())))

    if node.target in (transfers.all_gather, transfers.pend):
        arguments["sizes"] = pieces(arguments["dim"])
    elif node.target in (transfers.slice, transfers.reduce_scatter):
        arguments["sizes"] = pieces(arguments["dim"], axis)
    elif node.target is transfers.all_to_all:
        arguments["sizes"] = pieces(arguments["source"])
        arguments["new_sizes"] = pieces(arguments["target"], axis)
    if parts:
        local = iter(span(n, axes, mesh, at)[1] for n, axes in zip(sizes, splits, strict=True))
        arguments["parts"] = tuple(tuple(next(local) for _ in dim) for dim in parts)
    return transfers.call(node.target, operand, arguments)


@lru_cache(maxsize=4096)
def _pieces(size: Any, axes: Axes, mesh: Mesh, axis: str, at: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """Return the sizes of the pieces of a part on the ranks along an axis."""
    return tuple(span(size, axes, mesh, {**dict(at), axis: k})[1] for k in range(mesh.sizes[axis]))


def _redistributed(source: TensorType, result: TensorType) -> dict[str, Any]:
    """Return both ends of a redistribute, and the axes along which its ranks exchange data."""
    assert source.layout is not None and result.layout is not None
    pending = tuple(axis for axis, _ in source.attr.pending)
    sent = messages(source.layout, result.layout, source.shape, pending)
    arguments: dict[str, Any] = {**_splits(result, "splits", "parts"), "axis": axes_between(sent, source.layout.mesh)}
    if pending:
        arguments["kept"] = pending
    return {**arguments, "shape": source.shape, **_splits(source, "source", "source_parts")}
