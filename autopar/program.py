"""The program: an FX graph of functional ATen ops, one record a node, and a level."""

from __future__ import annotations

import difflib
import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.record import DTYPE_NAMES, Record, Result, ValueType
from autopar.torch_private import FakeTensorMode

if TYPE_CHECKING:
    from autopar.edit import Edit

LEVELS = ("traced", "placed", "explicit", "local", "scheduled")
KEY = "autopar"  # the one key of node.meta that is ours
INLINE_ELEMENTS = 16  # constants up to this size are printed in full


@dataclass
class Counts:
    """What has been done to a program's graph since it was made."""

    commits: int = 0
    inserted: int = 0
    removed: int = 0
    record_updates: int = 0
    node_visits: int = 0


@dataclass(frozen=True)
class Constant:
    """A tensor that the model made while it was captured: in full when small, else by the hash of its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    content: object
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def meaning(self) -> tuple[object, ...]:
        """What equality of programs compares; nan equals itself, and 0.0 is neither -0.0 nor 0."""
        return self.shape, self.dtype, repr(self.content)

    @staticmethod
    def of(tensor: torch.Tensor) -> Constant:
        tensor = tensor.detach()
        if tensor.numel() <= INLINE_ELEMENTS:
            content: object = _freeze(tensor.tolist())
        else:
            raw = tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
            content = f"{DTYPE_NAMES[tensor.dtype]}:" + hashlib.sha256(raw).hexdigest()[:16]
        return Constant(tuple(tensor.shape), tensor.dtype, content, tensor)


def _freeze(value: object) -> object:
    return tuple(_freeze(v) for v in value) if isinstance(value, list) else value


class Program:
    """A captured step on a mesh.

    Attributes:
        graph: the ``torch.fx.Graph``; its output node's one argument is the flat tuple of results.
        level: one of ``LEVELS``; passes keep or raise it.
        mesh: the mesh, ``None`` only for a traced program that has not met one.
        stages: named sub-meshes.
        streams: names of the streams, at the level ``scheduled``.
        coordinates: axis → index, at the levels ``local`` and ``scheduled``.
        tree: how the returned values are arranged: text fragments around the leaves.
        constants: tensors behind the ``get_attr`` nodes.
        counts: commits, insertions, record updates, visited nodes.
        version: another number after each change of the graph by an edit.
        fixed: why it takes no edits; empty where it takes them.
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
    def meshes(self) -> dict[str | None, Mesh]:
        """The mesh, whose name is ``None``, and the stages by name."""
        whole: dict[str | None, Mesh] = {} if self.mesh is None else {None: self.mesh}
        return whole | self.stages

    @property
    def rank(self) -> int:
        """Whose program it is, at the levels ``local`` and ``scheduled``."""
        assert self.mesh is not None and self.coordinates is not None
        return self.mesh.rank(self.coordinates)

    def coordinates_on(self, stage: str | None) -> dict[str, int]:
        """Axis → index of that rank on a stage; ``None`` is the mesh."""
        return dict(self.coordinates or {}) if stage is None else self.stages[stage].coordinates(self.rank)

    def at(self, coordinates: Mapping[str, int]) -> Program:
        """The same graph as the program of another rank of its class, one whose pieces have the same sizes."""
        return Program(self.graph, self.level, self.mesh, stages=self.stages, streams=self.streams,
                       coordinates=coordinates, tree=self.tree, constants=self.constants)  # fmt: skip

    def node(self, name: str) -> fx.Node:
        """The node of that name; ``KeyError`` with the nearest names. Linear: for people and tests."""
        for node in self.graph.nodes:
            if node.name == name:
                return node
        near = difflib.get_close_matches(name, [n.name for n in self.graph.nodes], n=3)
        raise KeyError(f"no value {name!r} in the program; near it: {', '.join(near) or 'none'}")

    def edit(self, *, sync: bool = False) -> Edit:
        """A batch of edits, committed once when its ``with`` block ends; ``sync=True`` commits after every op."""
        from autopar.edit import Edit

        return Edit(self, sync=sync)

    # -- text ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Program {self.level} on {self.mesh}: {len(self.graph.nodes)} nodes>"

    def text(self, *, comments: bool = False) -> str:
        """One line per value; ``comments=True`` adds module paths and source lines."""
        from autopar.text.printer import print_program

        return print_program(self, comments=comments)

    @staticmethod
    def parse(text: str) -> Program:
        """The program that prints as ``text``; ``TextError`` names the line and what is wrong with it."""
        from autopar.text.parser import parse_program

        return parse_program(text)

    def diff(self, other: Program | str) -> str:
        """The lines that differ, ``-`` those of this program and ``+`` those of ``other``."""
        lines = difflib.unified_diff(str(self).splitlines(), str(other).splitlines(), lineterm="", n=1)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))

    def verify(self) -> None:
        """Check what the level promises; ``VerifyError`` otherwise."""
        from autopar.verify import verify

        verify(self)

    # -- equality and copies -------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return self._facts() == other._facts() and all(
            a == b for a, b in zip(self._lines(), other._lines(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # mutable

    def _facts(self) -> tuple[object, ...]:
        return (
            self.level, self.mesh, tuple(self.stages.items()), self.streams,
            None if self.coordinates is None else tuple(self.coordinates.items()), self.tree, len(self.graph.nodes),
        )  # fmt: skip

    def _lines(self) -> Iterator[tuple[object, ...]]:
        for node in self.graph.nodes:
            args = (map_operands(node.args, _by_name), map_operands(dict(node.kwargs), _by_name))
            what = self.constants[node.target].meaning if node.op == "get_attr" else None  # type: ignore[index]
            target = node.target if node.op == "call_function" else what
            yield node.op, node.name, target, repr(args), record_of(node).meaning

    def copy(self) -> Program:
        """The same program on nodes of its own; records are shared, they never change."""
        graph = fx.Graph()
        nodes: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            nodes[node] = new = make_node(
                graph, node.name, node.op, node.target,
                map_operands(node.args, nodes.__getitem__), map_operands(node.kwargs, nodes.__getitem__),
            )  # fmt: skip
            set_record(new, record_of(node))
        return Program(graph, self.level, self.mesh, stages=self.stages, streams=self.streams,
                       coordinates=self.coordinates, tree=self.tree, constants=self.constants)  # fmt: skip


def is_early(value: fx.Node, result: Result) -> bool:
    """Whether a result is there when the forward ends."""
    return result.kind != "grad" and record_of(value).phase == "forward"


def fake_graph(program: Program) -> fx.GraphModule:
    """A traced program's graph as torch's own passes take one: inputs ``primals_…`` and ``tangents_…``, results of the forward first, and
    in ``meta`` a fake tensor for each value, and which ops are of the backward. Names of ops are the program's. Fakes are made of types; no op runs."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    mode = FakeTensorMode()

    def fake(type: ValueType) -> Any:
        if isinstance(type, tuple):
            return tuple(map(fake, type))
        return None if type is None else torch.empty(type.shape, dtype=type.dtype, device="meta")

    for node in program.nodes:
        record = record_of(node)
        if node.op == "output":
            rows = list(zip(operands(node), record.results, strict=True))
            graph.output(tuple(nodes[value] for value, result in sorted(rows, key=lambda row: not is_early(*row))))
            break
        if node.op == "call_function":
            args, kwargs = map_operands(node.args, nodes.__getitem__), map_operands(dict(node.kwargs), nodes.__getitem__)
            nodes[node] = new = make_node(graph, node.name, node.op, node.target, args, kwargs)
        else:  # a constant is an input too
            nodes[node] = new = graph.placeholder(f"{'tangents' if record.role == 'tangent' else 'primals'}_{len(nodes)}")
        with mode:
            new.meta["val"] = fake(record.type)
        if node.op == "call_function" and record.phase != "forward":
            new.meta["partitioner_tag"] = "must_be_in_backward"
    return fx.GraphModule({}, graph)


def _by_name(node: fx.Node) -> object:
    return ("%", node.name)


def has_record(node: fx.Node) -> bool:
    """Whether the node was made by capture, an edit or the parser, and not behind their back."""
    return KEY in node.meta


def record_of(node: fx.Node) -> Record:
    return node.meta[KEY]


def name_of(placeholder: fx.Node) -> str:
    """The user's name of a parameter, a buffer, an input, a state."""
    return record_of(placeholder).name or placeholder.name


def set_record(node: fx.Node, record: Record) -> None:
    node.meta[KEY] = record


def make_node(graph: fx.Graph, name: str, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    """A node of exactly this name; uniqueness is the caller's duty.

    FX gives another name where one was used in the graph before; then it knows that name, and setting it afterwards
    cannot collide with names FX will give later.
    """
    node = graph.create_node(op, target, args, dict(kwargs), name=name)
    if node.name != name:
        node.name = name
    return node


def operands(node: fx.Node) -> list[fx.Node]:
    """Every operand occurrence, in argument order; an operand used twice is listed twice."""
    found: list[fx.Node] = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            found.append(arg)
        elif isinstance(arg, (tuple, list)):
            _collect(arg, found)
    for arg in node.kwargs.values():
        _collect((arg,), found)
    return found


def _collect(values: Any, found: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def behind(values: Iterable[fx.Node]) -> set[fx.Node]:
    """The values, and all that they are made of."""
    found: set[fx.Node] = set()
    open_ = list(values)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_ += node.all_input_nodes
    return found


def map_operands(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    """``value`` with every node in it replaced, in argument order; lists stay lists."""
    if isinstance(value, fx.Node):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_operands(v, function) for v in value) if not hasattr(value, "_fields") else value
    if isinstance(value, Mapping):
        return {key: map_operands(v, function) for key, v in value.items()}
    return value


def is_getitem(node: fx.Node) -> bool:
    return node.target is operator.getitem


def element_type(node: fx.Node) -> ValueType:
    """The type of a ``getitem`` node, read off its operand."""
    source, index = node.args
    types = record_of(source).type  # type: ignore[arg-type]
    assert isinstance(types, tuple)
    return types[index]  # type: ignore[index]
