"""Localize: an explicit program in the shapes of one rank.

    explicit                                                      local at dp=0 tp=1
    h : f32[32/dp 256/tp] = relu(mm)                       →      h : f32[16 128] = relu(mm)
    y : f32[32/dp 256] = all_gather(h, 1, tp)              →      y : f32[16 256] = all_gather(h, 1, tp, sizes=[128, 128])

Size arguments become the piece's, and transfers get explicit piece sizes. Ranks whose pieces have equal sizes share a
program (a *class*); what differs between them, their coordinates, is an input of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from autopar import transfers
from autopar.collector import collector_paused
from autopar.layout import span
from autopar.mesh import Mesh
from autopar.program import Program, make_node, map_operands, operands, record_of, set_record
from autopar.record import Record, TensorType, ValueType
from autopar.rules.registry import rule_of
from autopar.torch_private import OpOverload


def rank_classes(program: Program) -> list[list[int]]:
    """The ranks of the program's mesh, grouped by equal piece sizes; ``[[0, 1], [2, 3]]``."""
    mesh = _mesh(program)
    splits: dict[tuple[int, tuple[str, ...]], None] = {}
    for node in program.nodes:
        types = record_of(node).type
        for type in types if isinstance(types, tuple) else (types,):
            if type is not None:
                for size, axes in type.attr.parts(type.shape):
                    for end in range(1, len(axes) + 1):
                        splits[size, axes[:end]] = None
    uneven = [(size, axes) for size, axes in splits if size % mesh.count(axes)]
    classes: dict[tuple[int, ...], list[int]] = {}
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        classes.setdefault(tuple(span(size, axes, mesh, at)[1] for size, axes in uneven), []).append(rank)
    return list(classes.values())


class LocalPrograms(Mapping[int, Program]):
    """Rank → its local program, of an explicit program. Made when they are asked for, one a class of ranks.

    Args:
        check: what each is given to when it has been made.
    """

    def __init__(self, program: Program, check: Callable[[Program], None]) -> None:
        self._program, self._check = program, check
        self._classes = rank_classes(program)
        self._class_of = {rank: k for k, ranks in enumerate(self._classes) for rank in ranks}
        self._made: dict[int, Program] = {}

    def __getitem__(self, rank: int) -> Program:
        """With the coordinates of ``rank``; the graph is that of its class. ``ValueError`` where it is not on the mesh."""
        at = _mesh(self._program).coordinates(rank)
        number = self._class_of[rank]
        if number not in self._made:
            with collector_paused():
                self._made[number] = localize(self._program, at)
            self._check(self._made[number])
        return self._made[number].at(at)

    def __iter__(self) -> Iterator[int]:
        return iter(self._class_of)

    def __len__(self) -> int:
        return len(self._class_of)


def localize(program: Program, coordinates: Mapping[str, int]) -> Program:
    """The program of the rank at ``coordinates``; linear in the graph.

    Raises:
        ValueError: the program is not explicit, or spans stages.
    """
    if program.level != "explicit":
        raise ValueError(f"localize takes an explicit program, this one is {program.level}")
    mesh = _mesh(program)
    mesh.rank(coordinates)
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in program.nodes:
        record = record_of(node)
        kind = _local_type(record.type, mesh, coordinates)
        args, kwargs = node.args, dict(node.kwargs)
        if node.target in transfers.BY_FUNCTION:
            args, kwargs = _transfer(node, mesh, coordinates)
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            args = _sizes(node, kind)
        new = make_node(graph, node.name, node.op, node.target,
                        map_operands(args, nodes.__getitem__), map_operands(kwargs, nodes.__getitem__))  # fmt: skip
        nodes[node] = new
        set_record(new, Record(kind, (), record.phase, record.role, record.index, record.name, record.results,
                               module=record.module, source=record.source))  # fmt: skip
    return Program(graph, "local", mesh, coordinates=coordinates, tree=program.tree, constants=program.constants)


def _mesh(program: Program) -> Mesh:
    if program.mesh is None or program.stages:
        raise ValueError("localize takes a program on one mesh; programs with stages run as pipelines")
    return program.mesh


def _local_type(type: ValueType, mesh: Mesh, at: Mapping[str, int]) -> ValueType:
    if isinstance(type, tuple):
        return tuple(_local_type(one, mesh, at) for one in type)  # type: ignore[misc]
    if type is None:
        return None
    return TensorType(type.attr.local_shape(type.shape, mesh, at), type.dtype)


def _sizes(node: fx.Node, kind: ValueType) -> tuple[Any, ...]:
    """Size arguments of the op, as its rule names them, in the shape of the local result."""
    rule = rule_of(node.target)
    if not rule.sizes:
        return node.args
    result = kind[0] if isinstance(kind, tuple) else kind
    assert isinstance(result, TensorType)
    return rule.resized(node.args, result.shape)


def _transfer(node: fx.Node, mesh: Mesh, at: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The transfer's arguments with explicit piece sizes, and the local sizes of parts where dims are merged."""
    given = transfers.arguments(node.target, node.args, node.kwargs)
    operand = operands(node)[0]
    if not given.keys() & {"dim", "source"}:
        return node.args, dict(node.kwargs)
    source = record_of(operand).type
    assert isinstance(source, TensorType)
    parts, axis = given.get("parts"), given["axis"]
    splits = [axes for dim in transfers.split_parts(source.attr, source.shape, mesh, parts) for axes in dim]
    sizes = [n for dim in parts for n in dim] if parts else list(source.shape)

    def pieces(place: int, *more: str) -> list[int]:
        return [span(sizes[place], (*splits[place], *more), mesh, {**at, axis: k})[1] for k in range(mesh.sizes[axis])]

    if node.target is transfers.all_gather:
        given["sizes"] = pieces(given["dim"])
    elif node.target in (transfers.slice, transfers.reduce_scatter):
        given["sizes"] = pieces(given["dim"], axis)
    elif node.target is transfers.all_to_all:
        given["sizes"] = pieces(given["source"])
        given["new_sizes"] = pieces(given["target"], axis)
    if parts:
        local = iter(span(n, axes, mesh, at)[1] for n, axes in zip(sizes, splits, strict=True))
        given["parts"] = tuple(tuple(next(local) for _ in dim) for dim in parts)
    return transfers.call(node.target, operand, given)
