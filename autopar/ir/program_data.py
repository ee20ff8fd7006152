"""Hold a program's graph with its level, mesh and constants, and compare and copy such programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sympy import Symbol
from torch import fx

from autopar.ir.constant import Constant
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import alike, make_node, map_operands, record_of, set_record
from autopar.ir.record import TensorType
from autopar.ir.sizes import Size, Values

if TYPE_CHECKING:
    from typing_extensions import Self

LEVELS = ("traced", "placed", "explicit", "local", "scheduled")


@dataclass
class Counts:
    """How often a program's graph has been changed and walked since it was made."""

    commits: int = 0
    inserted: int = 0
    removed: int = 0
    record_updates: int = 0
    node_visits: int = 0


class ProgramData:
    """The contents of a program: an FX graph with a record for each node, a level, and a mesh.

    Attributes:
        graph: the ``torch.fx.Graph``; its output node's one argument is the flat tuple of results.
        level: one of ``LEVELS``; passes keep or raise it.
        mesh: the mesh; ``None`` only for a traced program without one.
        stages: named sub-meshes.
        streams: names of the streams, at the level ``scheduled``.
        coordinates: axis → index, at the levels ``local`` and ``scheduled``.
        tree: the structure of the returned values: the text fragments around the leaves.
        constants: name → the tensor of a ``get_attr`` node.
        counts: how many commits, insertions, record updates and visited nodes there were.
        version: a number that changes with each change of the graph by an edit.
        fixed: why the program takes no edits; empty if it takes them.
    """

    def __init__(
        self,
        graph: fx.Graph,
        level: str = "traced",
        mesh: Mesh | None = None,
        *,
        stages: Mapping[str, Mesh] | None = None,
        streams: tuple[str, ...] = (),
        coordinates: Mapping[str, int] | None = None,
        tree: tuple[str, ...] = (),
        constants: Mapping[str, Constant] | None = None,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"no level {level!r}; levels are {', '.join(LEVELS)}")
        self.graph = graph
        self.level = level
        self.mesh = mesh
        self.stages = dict(stages or {})
        self.streams = streams
        self.coordinates = None if coordinates is None else dict(coordinates)
        self.tree = tree
        self.constants = dict(constants or {})
        self.counts = Counts()
        self.version = 0
        self.fixed = ""

    # -- nodes and records ---------------------------------------------------------------------------------------

    @property
    def nodes(self) -> Iterator[fx.Node]:
        return iter(self.graph.nodes)

    @property
    def output(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def sizes(self) -> Values:
        """The symbols in the shapes of placeholders, with their values in the call that was captured."""
        values: dict[Symbol, int] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            type = record_of(node).type
            if isinstance(type, TensorType):
                for size in type.shape:
                    if isinstance(size, Size) and size.expression.is_Symbol:
                        values.setdefault(size.expression, int(size))
        return values

    @property
    def meshes(self) -> dict[str | None, Mesh]:
        """The mesh under the name ``None``, and the stages by name."""
        whole: dict[str | None, Mesh] = {} if self.mesh is None else {None: self.mesh}
        return whole | self.stages

    @property
    def rank(self) -> int:
        """The rank whose program this is, at the levels ``local`` and ``scheduled``."""
        assert self.mesh is not None and self.coordinates is not None
        return self.mesh.rank(self.coordinates)

    def coordinates_on(self, stage: str | None) -> dict[str, int]:
        """Return axis → index of that rank on a stage; ``None`` is the mesh."""
        return dict(self.coordinates or {}) if stage is None else self.stages[stage].coordinates(self.rank)

    def at(self, coordinates: Mapping[str, int]) -> Self:
        """Return the program of another rank on the same graph; the pieces of both ranks must have the same sizes."""
        return type(self)(self.graph, self.level, self.mesh, stages=self.stages, streams=self.streams,
                          coordinates=coordinates, tree=self.tree, constants=self.constants)  # fmt: skip

    def node(self, name: str) -> fx.Node:
        """Return the node of that name; ``KeyError`` with the nearest names.

        Linear in the graph: meant for people and tests.
        """
        for node in self.graph.nodes:
            if node.name == name:
                return node
        near = difflib.get_close_matches(name, [n.name for n in self.graph.nodes], n=3)
        raise KeyError(f"no value {name!r} in the program; near it: {', '.join(near) or 'none'}")

    # -- equality and copies -------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProgramData):
            return NotImplemented
        return self._facts() == other._facts() and all(
            self._means(node, other, another) for node, another in zip(self.nodes, other.nodes, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # mutable

    def _facts(self) -> tuple[object, ...]:
        return (
            self.level, self.mesh, tuple(self.stages.items()), self.streams,
            None if self.coordinates is None else tuple(self.coordinates.items()), self.tree, len(self.graph.nodes),
        )  # fmt: skip

    def _means(self, node: fx.Node, other: ProgramData, another: fx.Node) -> bool:
        """Whether a node means the same as another one, of another program."""
        if (node.op, node.name) != (another.op, another.name) or record_of(node).meaning != record_of(another).meaning:
            return False
        if node.op == "call_function" and node.target != another.target:
            return False
        if node.op == "get_attr":
            constant, its_constant = self.constants[str(node.target)], other.constants[str(another.target)]
            if constant.meaning != its_constant.meaning:
                return False
        return alike(node.args, another.args) and alike(node.kwargs, another.kwargs)

    def copy(self) -> Self:
        """Return the same program on new nodes. Records are shared; they never change."""
        graph = fx.Graph()
        nodes: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            nodes[node] = new = make_node(
                graph, node.name, node.op, node.target,
                map_operands(node.args, nodes.__getitem__), map_operands(node.kwargs, nodes.__getitem__),
            )  # fmt: skip
            set_record(new, record_of(node))
        return type(self)(graph, self.level, self.mesh, stages=self.stages, streams=self.streams,
                          coordinates=self.coordinates, tree=self.tree, constants=self.constants)  # fmt: skip
