"""Write records as JSON by the annotations of their fields, and read them back: programs, and what holds them.

A record is a dataclass or a named tuple of numbers, texts, types, layouts, programs, and further records. A new field
is kept as soon as it is there. What several records share, as a program, is written once.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import torch

from autopar.cache.folder import NotCached
from autopar.cache.program_rows import Types, attr_of, attr_row, program_of, rows_of, size_of, size_row
from autopar.gc_pause import gc_paused
from autopar.ir.layout import DistAttr, Layout, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, DTYPES, TensorType
from autopar.runtime.localize import LocalPrograms
from autopar.scheduling.lines import KINDS, Line, Part
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.order import Order
from autopar.scheduling.simulation import Schedule, Simulation, Span
from autopar.verify.levels import verify

# -- order rows --------------------------------------------------------------------------------------------------------
#
# Write the order in which a program runs as JSON, and read it back; the times of schedules are read when asked for.


def order_to_json(order: Order) -> dict[str, Any]:
    return {
        "functions": [
            [list(each.phases), _lines(each.lines), sorted(each.late), each.stage] for each in order.functions
        ],
        "schedules": json.dumps(list(map(_schedule, order.schedules)), separators=(",", ":")),
        "source": order.source,
        "across": list(order.across),
    }


def order_of(content: Mapping[str, Any]) -> Order:
    functions = tuple(
        FunctionLines(tuple(phases), _lines_of(lines), frozenset(late), stage)
        for phases, lines, late, stage in content["functions"]
    )
    schedules: Any = Schedules(content["schedules"], len(functions))
    return Order(functions, schedules, content["source"], tuple(content["across"]))


def _lines(lines: Sequence[Line]) -> list[Any]:
    """Return the lines; an op that computes is one part, and begins with its name."""
    return [[KINDS.index(line.kind), *(value for part in line.parts for value in part)] for line in lines]


def _lines_of(rows: Sequence[Sequence[Any]]) -> tuple[Line, ...]:
    return tuple(Line(KINDS[row[0]], _parts(row[1:])) for row in rows)


def _parts(values: Sequence[Any]) -> tuple[Part, ...]:
    if len(values) == 3:
        return (Part(*values),)
    return tuple(Part(*values[k : k + 3]) for k in range(0, len(values), 3))


def _schedule(made: Schedule) -> list[Any]:
    spans = [[[list(part) for part in span.parts], span.stream, span.begin, span.end] for span in made.spans]
    return [
        made.policy, made.issue, _lines(made.lines), spans, made.makespan, made.exposed, made.bound, made.memory,
        sorted(made.late), made.start_seconds,
    ]  # fmt: skip


def _schedule_of(row: Sequence[Any]) -> Schedule:
    policy, issue, lines, spans, makespan, exposed, bound, memory, late, start_seconds = row
    simulation = Simulation(
        tuple(Span(tuple(Part(*part) for part in parts), *rest) for parts, *rest in spans), makespan, exposed
    )
    return Schedule(policy, issue, _lines_of(lines), simulation, bound, memory, frozenset(late), start_seconds)


class Schedules(Sequence[Schedule]):
    """The schedules of an order, which are read from their text once somebody asks for one."""

    def __init__(self, text: str, count: int) -> None:
        self._text, self._count = text, count
        self._read: tuple[Schedule, ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Schedule: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Schedule]: ...

    def __getitem__(self, index: int | slice) -> Schedule | Sequence[Schedule]:
        if self._read is None:
            self._read = tuple(map(_schedule_of, json.loads(self._text)))
        return self._read[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


# -- records -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")
MOST_CLASSES = 4  # of ranks; the programs of more are made again from the explicit one
PLAIN = (bool, float, str, types.NoneType)
LATER = Callable[[], Program]  # a program that is read when it is asked for


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How values of one class are written that are no records.

    Attributes:
        write: value → its JSON.
        read: JSON → the value.
        shared: whether a value that several records have is written once.
    """

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    shared: bool = False


def given(value: Any) -> Leaf:
    """Return the form of a value that the reader has: nothing is written."""
    return Leaf(lambda _: None, lambda _: value)


class Records:
    """The records of one entry of the cache.

    Args:
        leaves: class → the form of its values, beside those that all entries have.
        content: what ``to_json`` has returned, to be read.
        fixed: why the programs take no edits.
    """

    def __init__(self, leaves: Mapping[Any, Leaf], content: Mapping[str, Any] | None = None, fixed: str = "") -> None:
        self.types = table = Types() if content is None else Types.of(content["types"])
        self._fixed = fixed
        self._shared: dict[str, list[Any]] = {} if content is None else content["shared"]
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no other object gets the identity of one that was written
        self._read: dict[tuple[str, int], Any] = {}
        self._leaves: dict[Any, Leaf] = {
            int: Leaf(size_row, size_of),
            torch.dtype: Leaf(DTYPE_NAMES.__getitem__, DTYPES.__getitem__),
            TensorType: Leaf(table.number, table.at),
            DistAttr: Leaf(attr_row, attr_of),
            Mesh: Leaf(table.mesh, lambda number: table.meshes[number]),
            Layout: Leaf(table.layout, lambda row: layout_of(table.meshes[row[2]], attr_of(row[:2]))),
            Program: Leaf(lambda program: rows_of(program, table), lambda rows: program_of(rows, table), shared=True),
            LocalPrograms: Leaf(self._local, self._local_of),
            LATER: Leaf(lambda make: self.written(make(), Program), lambda number: partial(self.read, number, Program)),
            **leaves,
        }

    def to_json(self, record: Any, kind: Any) -> dict[str, Any]:
        """Return a record as JSON. ``NotCached`` if a part of it has no form that another process could read."""
        return {"record": self.written(record, kind), "shared": self._shared, "types": self.types.to_json()}

    def program(self) -> Program:
        """Return the first program of the records."""
        return self.read(0, Program)

    # -- by annotation ---------------------------------------------------------------------------------------------

    def written(self, value: Any, kind: Any) -> Any:
        """Return a value as JSON. ``kind``: its annotation."""
        if leaf := self._leaves.get(kind):
            return self._number(value, kind, leaf) if leaf.shared else leaf.write(value)
        shape, parts = _shape(kind)
        if shape == "plain":
            return value
        if shape == "optional":
            return None if value is None else self.written(value, parts)
        if shape == "record":
            return [self.written(getattr(value, name), of) for name, of in parts]
        if shape == "fixed":
            return [self.written(part, of) for part, of in zip(value, parts, strict=True)]
        if shape == "table":
            return [[self.written(part, of) for part, of in zip(row, parts, strict=True)] for row in value.items()]
        return [self.written(part, parts) for part in (sorted(value) if shape == "set" else value)]

    def read(self, row: Any, kind: Any) -> Any:
        """Return the value of an annotation that was written so. What is malformed raises an error of any kind."""
        if leaf := self._leaves.get(kind):
            return self._of_number(row, kind, leaf) if leaf.shared else leaf.read(row)
        shape, parts = _shape(kind)
        if shape == "plain":
            return row
        if shape == "optional":
            return None if row is None else self.read(row, parts)
        if shape == "record":
            return kind(*(self.read(part, of) for part, (_, of) in zip(row, parts, strict=True)))
        if shape == "fixed":
            return tuple(self.read(part, of) for part, of in zip(row, parts, strict=True))
        if shape == "table":
            return {self.read(key, parts[0]): self.read(value, parts[1]) for key, value in row}
        read = (self.read(part, parts) for part in row)
        return {"set": frozenset, "list": list, "many": tuple}[shape](read)

    def _number(self, value: Any, kind: Any, leaf: Leaf) -> int:
        if id(value) not in self._numbers:
            self._alive.append(value)
            rows = self._shared.setdefault(kind.__name__, [])
            self._numbers[id(value)] = len(rows)
            rows.append(leaf.write(value))
        return self._numbers[id(value)]

    def _of_number(self, number: int, kind: Any, leaf: Leaf) -> Any:
        key = kind.__name__, number
        if key not in self._read:
            self._read[key] = leaf.read(self._shared[kind.__name__][number])
        return self._read[key]

    # -- local programs --------------------------------------------------------------------------------------------

    def _local(self, local: LocalPrograms) -> Any:
        if local.order is None:  # a program that is joined with others before it runs
            return [self.written(local.program, Program), None, local.ranks_of_classes, None]
        if any(str(node.target) == "autopar.assumed.default" for node in local.program.nodes):
            raise NotCached("the program is for the values that the inputs had")
        made = local.every_class
        rows = [rows_of(each, self.types) for each in made] if len(made) <= MOST_CLASSES else None
        return [self.written(local.program, Program), order_to_json(local.order), local.ranks_of_classes, rows]

    def _local_of(self, row: Any) -> LocalPrograms:
        number, order, classes, rows = row
        program = self.read(number, Program)
        program.fixed = self._fixed
        if order is None:
            return LocalPrograms(program, lambda made: None, None, [list(map(int, ranks)) for ranks in classes])
        return KeptLocalPrograms(
            program, order_of(order), [list(map(int, ranks)) for ranks in classes], rows, self.types
        )


@cache
def _shape(kind: Any) -> tuple[str, Any]:
    """Return how the values of an annotation are written, and the annotations of their parts.

    ``TypeError`` if there is no form for them.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind in PLAIN or origin is Literal:
        return "plain", ()
    if origin in (Union, types.UnionType):
        others = [each for each in args if each is not types.NoneType]
        if all(each in (*PLAIN, int) for each in others):
            return "plain", ()
        if len(others) == 1:
            return "optional", others[0]
    elif origin is tuple:
        return ("many", args[0]) if args[1:] == (...,) else ("fixed", args)
    elif origin is frozenset:
        return "set", args[0]
    elif origin is list:
        return "list", args[0]
    elif origin in (dict, Mapping):
        return "table", args
    elif isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        hints = get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else vars(kind)["_fields"]
        return "record", tuple((name, hints[name]) for name in names)
    raise TypeError(f"{kind} has no form in the cache; give it a leaf")


class KeptLocalPrograms(LocalPrograms):
    """The local programs of an explicit program, which another process has made and verified."""

    def __init__(self, program: Program, order: Order, classes: list[list[int]], rows: Any, table: Types) -> None:
        super().__init__(program, lambda local: verify(local, "schedule"), order, classes)
        self._rows, self._types = rows, table

    def _make(self) -> None:
        rows, self._rows = self._rows, None
        try:
            with gc_paused():
                self._made = {k: program_of(row, self._types) for k, row in enumerate(rows)}
        except Exception:  # whatever reading malformed rows raises; the explicit program has all that is needed
            super()._make()
