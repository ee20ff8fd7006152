"""Write a program as rows of JSON, and read it back: as fast as nodes can be made, and with what its text leaves out.

One row for each value. Operands are names; other arguments are JSON, with a list that begins with a letter for what
JSON has not.

    ["mm_1_tp", "f", "all_reduce", ["mm_1", ["s", "tp"]], null, 17, …]

Types, requirements and repeated words stand once, in tables, and rows have their numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.cache.folder import NotCached
from autopar.ir import transfers
from autopar.ir.constant import INLINE_ELEMENTS, Constant
from autopar.ir.layout import DistAttr, Layout, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import make_node, record_of, set_record
from autopar.ir.ops.local_map import FUNCTIONS
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, DTYPES, Call, Record, Requirement, Result, TensorType, ValueType
from autopar.ir.sizes import Size, Values, expression_text, read_size, symbol
from autopar.torch_private import OpOverload

# -- size rows ---------------------------------------------------------------------------------------------------------
#
# Write sizes as JSON, and read them back: a number as it is, and one that follows from symbols with its expression.
#
# 8                                8
# s0*s1, captured as 8 × 64        ["z", "s0*s1", [["s0", 8], ["s1", 64]]]


SIZE = "z"


def size_row(size: Any) -> Any:
    """Return a size as JSON; anything else as it is."""
    if size.__class__ is not Size:
        return size
    return [SIZE, expression_text(size.expression), [[str(each), value] for each, value in size.values.items()]]


def size_of(row: Any) -> Any:
    """Return the size of a row. ``ValueError`` if it is none."""
    if row.__class__ is not list:
        return row
    kind, text, values = row
    if kind != SIZE:
        raise ValueError(f"{kind!r} begins no size")
    return _size(text, tuple(map(tuple, values)))


@lru_cache(maxsize=4096)
def _size(text: str, values: tuple[tuple[str, int], ...]) -> int:
    return read_size(text, _values(values))


@lru_cache(maxsize=256)
def _values(values: tuple[tuple[str, int], ...]) -> Values:
    """Sizes of one call share their values."""
    found: Mapping[Any, int] = {symbol(name): value for name, value in values}
    return found


# -- program rows ------------------------------------------------------------------------------------------------------


SPACES = ("aten", "autopar", "drawn")  # the ops of these are torch's or autopar's own
KINDS = {"placeholder": "p", "get_attr": "c", "call_function": "f", "output": "o"}
OPS = {letter: kind for kind, letter in KINDS.items()}
NAMED = {str(value): value for value in (  # what prints as ``torch.strided``
    torch.strided, torch.sparse_coo, torch.contiguous_format, torch.preserve_format, torch.channels_last,
    torch.channels_last_3d,
)}  # fmt: skip
GETITEM = "[]"
PLAIN_ROW = 11  # entries of the row of an op that is neither a placeholder nor issued on a stream
NOWHERE = (None, False, "", None)


class Types:
    """The tables of types and requirements of several programs on the same meshes.

    Attributes:
        rows: of each type or requirement: shape (``None`` for a requirement), dtype, dims and pending axes (``None``
            without a layout), and the number of the mesh.
    """

    def __init__(self, meshes: Sequence[Mesh] = (), rows: Sequence[Any] = ()) -> None:
        self.meshes = list(meshes)
        self.rows = list(rows)
        self._numbers: dict[Any, int] = {}
        self._read: list[Any] = [None] * len(self.rows)

    def to_json(self) -> dict[str, Any]:
        return {"meshes": [_mesh_row(mesh) for mesh in self.meshes], "rows": self.rows}

    @staticmethod
    def of(content: Mapping[str, Any]) -> Types:
        return Types([_mesh(row) for row in content["meshes"]], content["rows"])

    # -- written -----------------------------------------------------------------------------------------------------

    def number(self, value: TensorType | Requirement) -> int:
        """Return the number of a type or a requirement."""
        known = self._numbers.get(value)
        if known is None:
            known = self._numbers[value] = len(self.rows)
            shape = None
            if isinstance(value, TensorType):
                shape = list(map(size_row, value.shape))
            self.rows.append([shape, DTYPE_NAMES[value.dtype], *self.layout(value.layout)])
        return known

    def layout(self, layout: Layout | None) -> list[Any]:
        """Return dims, pending axes and the number of the mesh."""
        if layout is None:
            return [None, None, None]
        return [*attr_row(layout.attr), self.mesh(layout.mesh)]

    def mesh(self, mesh: Mesh | None) -> int | None:
        """Return the number of a mesh."""
        if mesh is None:
            return None
        if mesh not in self.meshes:
            self.meshes.append(mesh)
        return self.meshes.index(mesh)

    def value(self, type: ValueType) -> Any:
        """Return the number of a type, or a list of numbers for several results."""
        if isinstance(type, tuple):
            return [None if part is None else self.number(part) for part in type]
        return None if type is None else self.number(type)

    # -- read --------------------------------------------------------------------------------------------------------

    def at(self, number: int) -> Any:
        """Return the type or requirement of a number."""
        known = self._read[number]
        if known is None:
            shape, dtype, dims, pending, mesh = self.rows[number]
            layout = None if dims is None else layout_of(self.meshes[mesh], attr_of([dims, pending]))
            kind = DTYPES[dtype]
            known = Requirement(layout, kind) if shape is None else TensorType(tuple(map(size_of, shape)), kind, layout)
            self._read[number] = known
        return known

    def value_at(self, row: Any) -> ValueType:
        if isinstance(row, list):
            return tuple(None if number is None else self.at(number) for number in row)
        return None if row is None else self.at(row)


def attr_row(attr: DistAttr) -> list[Any]:
    """Return a distributed attribute as JSON."""
    dims = [[[size_row(size), list(axes)] for size, axes in dim] for dim in attr.dims]
    return [dims, [list(pair) for pair in attr.pending]]


def attr_of(row: Sequence[Any]) -> DistAttr:
    """Return the distributed attribute of a row."""
    dims, pending = row
    return DistAttr(
        tuple(tuple((size_of(size), tuple(axes)) for size, axes in dim) for dim in dims),
        tuple((axis, kind) for axis, kind in pending),
    )


def _mesh_row(mesh: Mesh) -> list[Any]:
    ranks = None if mesh.ranks == tuple(range(mesh.size)) else list(mesh.ranks)
    return [dict(mesh.axes), ranks, mesh.name]


def _mesh(row: Sequence[Any]) -> Mesh:
    axes, ranks, name = row
    return Mesh(axes, ranks=ranks, name=name)


# -- written -----------------------------------------------------------------------------------------------------------


def rows_of(program: Program, types: Types) -> dict[str, Any]:
    """Return a program as JSON. ``NotCached`` if a part of it has no form that another process could read."""
    return _Writer(program, types).run()


class _Writer:
    def __init__(self, program: Program, types: Types) -> None:
        self.program, self.types = program, types
        self.words: dict[str, int] = {}
        self.uses: dict[Any, int] = {}

    def run(self) -> dict[str, Any]:
        program = self.program
        rows = [self.row(node) for node in program.nodes]
        used = {str(node.target) for node in program.nodes if node.op == "get_attr"}
        return {
            "level": program.level,
            "mesh": self.types.mesh(program.mesh),
            "stages": {name: self.types.mesh(mesh) for name, mesh in program.stages.items()},
            "tree": list(program.tree),
            "streams": list(program.streams),
            "coordinates": program.coordinates,
            "constants": {name: _constant_row(made) for name, made in program.constants.items() if name in used},
            "words": list(self.words),
            "uses": list(map(list, self.uses)),
            "rows": rows,
        }

    def row(self, node: fx.Node) -> list[Any]:
        record = record_of(node)
        target = self.target(node)
        uses = tuple(None if need is None else self.types.number(need) for need in record.uses)
        row = [
            node.name,
            KINDS[node.op],
            target,
            [written(arg) for arg in node.args],
            {key: written(value) for key, value in node.kwargs.items()} or 0,
            self.types.value(record.type),
            self.uses.setdefault(uses, len(self.uses)),
            self.word(record.phase),
            self.word(record.module),
            self.word(record.source),
            0 if record.call is None else [record.call.number, self.word(record.call.op)],
        ]
        if record.role or record.name or record.results or record.index is not None:
            results = [[result.kind, result.of] for result in record.results]
            row.append([record.role, record.index, record.name, results])
        if record.stream is not None or record.started or record.message or record.span:
            row += [0] * (len(row) == PLAIN_ROW)
            row.append([record.stream, record.started, record.message, record.span])
        return row

    def word(self, text: str) -> int:
        return self.words.setdefault(text, len(self.words))

    def target(self, node: fx.Node) -> int:
        if node.op != "call_function":
            return self.word(str(node.target))
        return self.word(op_name(node.target))


def op_name(target: Any) -> str:
    """Return the name of an op, a transfer or ``getitem``. ``NotCached`` for ops of others."""
    if target is operator.getitem:
        return GETITEM
    if target in transfers.BY_FUNCTION:
        return transfers.BY_FUNCTION[target].name
    if not isinstance(target, OpOverload):
        raise NotCached(f"the program calls {target}, which is no op")
    if target.namespace not in SPACES:
        raise NotCached(f"the program has the op {target}, whose code is not torch's")
    name = str(target)
    if name.startswith("autopar.local_map"):
        raise NotCached(f"the program has local_map, and runs your functions: {', '.join(FUNCTIONS)}")
    if _op(name) is not target:
        raise NotCached(f"the op {name} was registered anew")
    return name


def op_of(name: str) -> Callable[..., Any]:
    """Return the op, transfer or ``getitem`` of a name."""
    if name == GETITEM:
        return operator.getitem
    if name in transfers.TRANSFERS:
        return transfers.TRANSFERS[name].function
    return _op(name)


def _op(name: str) -> Any:
    space, packet, overload = name.split(".")
    if space not in SPACES:
        raise ValueError(f"{name} is no op of torch or autopar")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def written(value: Any) -> Any:
    """Return an argument as JSON; a node by its name. ``NotCached`` if it has no form."""
    kind = value.__class__
    if kind is fx.Node:
        return value.name
    if value is None or kind is bool or kind is int or kind is float:
        return value
    if kind is str:
        return ["s", value]
    if kind is list:
        return ["l", *map(written, value)]
    if kind is tuple or kind is torch.Size:
        return ["t", *map(written, value)]
    if kind is dict:
        return ["m", [[key, written(part)] for key, part in value.items()]]
    if kind is torch.dtype:
        return ["d", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["v", str(value)]
    if kind in (torch.layout, torch.memory_format) and str(value) in NAMED:
        return ["n", str(value)]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is fx.immutable_collections.immutable_list:
        return ["l", *map(written, value)]
    if kind is fx.immutable_collections.immutable_dict:
        return ["m", [[key, written(part)] for key, part in value.items()]]
    if kind is Size:
        return size_row(value)
    raise NotCached(f"an argument of the program is a {kind.__module__}.{kind.__qualname__}")


def _constant_row(constant: Constant) -> list[Any]:
    tensor = constant.tensor
    if tensor is None or isinstance(constant.content, str) or tensor.numel() > INLINE_ELEMENTS:
        raise NotCached(f"the program has a constant of shape {list(constant.shape)}, which is kept by its hash alone")
    return [list(constant.shape), DTYPE_NAMES[constant.dtype], _numbers(constant.content), str(tensor.device)]


def _numbers(content: Any) -> Any:
    if isinstance(content, tuple):
        return ["t", *map(_numbers, content)]
    return written(content)


# -- read --------------------------------------------------------------------------------------------------------------


def program_of(content: Mapping[str, Any], types: Types) -> Program:
    """Return the program of such rows. What is malformed raises an error of any kind."""
    return _Reader(content, types).run()


class _Reader:
    def __init__(self, content: Mapping[str, Any], types: Types) -> None:
        self.content, self.types = content, types
        self.words: list[str] = content["words"]
        self.nodes: dict[str, fx.Node] = {}
        self.uses = [tuple(None if n is None else types.at(n) for n in row) for row in content["uses"]]
        self.ops: dict[int, Any] = {}

    def run(self) -> Program:
        content, types, graph = self.content, self.types, fx.Graph()
        words, nodes, all_uses, ops = self.words, self.nodes, self.uses, self.ops
        read, value_at = self.read, types.value_at
        for name, letter, target, args, kwargs, type, uses, phase, module, source, call, *more in content["rows"]:
            op = OPS[letter]
            if op == "call_function":
                function = ops.get(target)
                if function is None:
                    function = ops[target] = op_of(words[target])
            else:
                function = words[target]
            node = make_node(
                graph, name, op, function, tuple(map(read, args)),
                {key: read(value) for key, value in kwargs.items()} if kwargs else {},
            )  # fmt: skip
            nodes[name] = node
            role, index, own, results = (more and more[0]) or ("", None, "", ())
            stream, started, message, span = more[1] if len(more) > 1 else NOWHERE
            set_record(node, Record(
                value_at(type), all_uses[uses], words[phase], role, index, own,
                tuple(Result(kind, of) for kind, of in results), stream, started, message,
                None if span is None else tuple(span), module=words[module], source=words[source],
                call=Call(call[0], words[call[1]]) if call else None,
            ))  # fmt: skip
        mesh = content["mesh"]
        return Program(
            graph, content["level"], None if mesh is None else types.meshes[mesh],
            stages={name: types.meshes[at] for name, at in content["stages"].items()}, tree=tuple(content["tree"]),
            streams=tuple(content["streams"]), coordinates=content["coordinates"],
            constants={name: _constant(row) for name, row in content["constants"].items()},
        )  # fmt: skip

    def read(self, value: Any) -> Any:
        kind = value.__class__
        if kind is str:
            return self.nodes[value]
        if kind is not list:
            return value
        return read_argument(value, self.read)


def read_argument(value: Sequence[Any], read: Callable[[Any], Any]) -> Any:
    """Return an argument that was written as a list."""
    letter = value[0]
    if letter == "l":
        return [read(part) for part in value[1:]]
    if letter == "t":
        return tuple(read(part) for part in value[1:])
    if letter == "s":
        return str(value[1])
    if letter == "d":
        kind = getattr(torch, value[1])
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{value[1]} is no dtype")
        return kind
    if letter == "v":
        return torch.device(value[1])
    if letter == "n":
        return NAMED[value[1]]
    if letter == "c":
        return complex(value[1], value[2])
    if letter == "m":
        return {key: read(part) for key, part in value[1]}
    if letter == SIZE:
        return size_of(value)
    raise ValueError(f"{letter!r} begins no argument")


def plain(value: Any) -> Any:
    """Read an argument that has no nodes."""
    if isinstance(value, str):
        raise ValueError(f"{value!r} is a node, and none is possible here")
    return read_argument(value, plain) if isinstance(value, list) else value


def _constant(row: Sequence[Any]) -> Constant:
    shape, dtype, content, device = row
    numbers = plain(content)
    tensor = torch.tensor(numbers, dtype=DTYPES[dtype], device=device).reshape(shape)
    return Constant(tuple(shape), DTYPES[dtype], numbers, tensor)
