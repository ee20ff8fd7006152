"""Liveness: from when to when a rank's memory holds each value of its program.

One walk in the order of execution. A value is made by its op and let go behind the last op that reads it, as in the functions that
run it; a view keeps what it views. What the caller holds stays: parameters, inputs, returned values, gradients. A state's next
value is written into the state's memory, or takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType, ValueType
from autopar.ir.value_names import gradient_name, gradient_parameter
from autopar.torch_private import OpOverload, returns_alias

aten = torch.ops.aten

KINDS = ("parameters", "gradients", "optimizer state", "buffers", "inputs", "activations", "transfers")
OF_ROLE = {"param": "parameters", "buffer": "buffers", "state": "buffers", "tangent": "activations"}  # others: inputs
START = -1  # before the first op

HIDDEN_VIEWS = {aten._unsafe_view.default}  # share memory, and their schemas do not say so


@dataclass(eq=False)
class Storage:
    """A piece of memory.

    Attributes:
        node: the value that it was made for; views of it share it.
        bytes: its size, of the rank's piece.
        kind: one of ``KINDS``.
        born, dies: positions of ops in ``Lifetimes.ops``: the one that makes it, and the last that reads it. ``START`` is before the first one,
            their number behind the last.
    """

    node: fx.Node
    bytes: int
    kind: str
    born: int
    dies: int


@dataclass(frozen=True)
class Lifetimes:
    """What ``liveness`` returns.

    Attributes:
        ops: the nodes that run, in order.
        storages: in the order in which they are made.
    """

    program: Program
    ops: tuple[fx.Node, ...]
    storages: tuple[Storage, ...]

    def held(self) -> list[int]:
        """Bytes in use while each op runs, what it reads and what it makes included."""
        changes = [0] * (len(self.ops) + 1)
        total = 0
        for one in self.storages:
            if one.born == START:
                total += one.bytes
            else:
                changes[one.born] += one.bytes
            if one.dies < len(self.ops):
                changes[one.dies + 1] -= one.bytes
        found = []
        for change in changes[: len(self.ops)]:
            total += change
            found.append(total)
        return found

    def at(self, position: int) -> Iterator[Storage]:
        """What is in use while an op runs."""
        return (one for one in self.storages if one.born <= position <= one.dies)


def liveness(program: Program, kept: Collection[str] | None = None, kinds: Mapping[str, str] | None = None, *, in_place: bool = True) -> Lifetimes:
    """When each piece of a rank's memory is in use; linear in the graph.

    Buffers that torch's kernels, collectives and their buckets need while they run are not seen.

    Args:
        program: of one rank: level ``local`` or ``scheduled``.
        kept: the placeholders that the caller holds to the end; when left out, all but tangents and states that are not written in place.
        kinds: placeholder → one of ``KINDS``, where its role and name do not say it.
        in_place: next values of states are written into their memory.

    Raises:
        ValueError: the program is not one of a rank, or has no such placeholder.
    """
    if program.level not in ("local", "scheduled"):
        raise ValueError(f"liveness takes the program of one rank, in the shapes of its pieces; this one is {program.level}: localize it")
    return _Walk(program, kept, kinds or {}, in_place).run()


class _Walk:
    def __init__(self, program: Program, kept: Collection[str] | None, kinds: Mapping[str, str], in_place: bool) -> None:
        self.program, self.kinds, self.in_place = program, kinds, in_place
        self.placeholders = {node.name: node for node in program.placeholders}
        if unknown := (set(kept or ()) | set(kinds)) - set(self.placeholders):
            raise ValueError(f"the program has no placeholder {min(unknown)!r}; it has {', '.join(self.placeholders)}")
        given_up = {"tangent"} if in_place else {"tangent", "state"}
        self.kept = {name for name, n in self.placeholders.items() if record_of(n).role not in given_up} if kept is None else set(kept)
        self.names = {name_of(node) for node in self.placeholders.values()}
        self.ops = [node for node in program.nodes if node.op == "call_function"]
        self.storages: list[Storage] = []
        self.of: dict[fx.Node, tuple[tuple[Storage, ...], ...]] = {}  # value → what each of its parts lies in; a tuple has several
        self.donated: dict[tuple[fx.Node, int], fx.Node] = {}  # (op, part) → the state of which it makes the next value

    def run(self) -> Lifetimes:
        output = self.program.output
        rows = list(zip(operands(output), record_of(output).results, strict=True))
        for value, result in rows:
            if result.kind == "state" and value.op == "call_function" and self.in_place:
                self.donated[(value.args[0], value.args[1]) if is_getitem(value) else (value, 0)] = self.placeholders[result.of]  # type: ignore[index]
        end = len(self.ops)
        for node in self.program.nodes:
            if node.op == "placeholder" or node.op == "get_attr":
                self.hold(node, end)
        for position, node in enumerate(self.ops):
            for operand in operands(node):
                self.read(operand, position)
            self.make(node, position)
        for value, result in rows:
            self.read(value, end)
            for one in self.of[value][0]:
                if result.kind != "return" and one.kind in ("activations", "transfers"):
                    one.kind = "gradients" if result.kind == "grad" else self.of[self.placeholders[result.of]][0][0].kind
        return Lifetimes(self.program, tuple(self.ops), tuple(self.storages))

    def hold(self, node: fx.Node, end: int) -> None:
        record = record_of(node)
        lives = node.op == "get_attr" or node.name in self.kept
        one = Storage(node, size(record.type), self.kind(node, record), START, end if lives else START)
        self.storages.append(one)
        self.of[node] = ((one,),)

    def kind(self, node: fx.Node, record: Record) -> str:
        name = name_of(node)
        if node.name in self.kinds:
            return self.kinds[node.name]
        if record.role in ("state", "buffer") and gradient_parameter(name) is not None:
            return "gradients"
        if record.role == "state" and gradient_name(name) in self.names:
            return "parameters"
        if record.role == "state" and self.ops and record_of(self.ops[0]).phase == "update":
            return "optimizer state"
        return "buffers" if node.op == "get_attr" else OF_ROLE.get(record.role, "inputs")

    def read(self, node: fx.Node, position: int) -> None:
        for part in self.of[node]:
            for one in part:
                one.dies = max(one.dies, position)

    def make(self, node: fx.Node, position: int) -> None:
        type = record_of(node).type
        parts = type if isinstance(type, tuple) else (type,)
        if is_getitem(node):
            self.of[node] = (self.of[node.args[0]][node.args[1]],)  # type: ignore[index]
            return
        shared = self.shared(node)
        found: list[tuple[Storage, ...]] = []
        for k, part in enumerate(parts):
            state = self.donated.get((node, k))
            if shared is not None or state is not None:
                found.append(self.of[state][0] if state is not None else shared)  # type: ignore[arg-type]
                continue
            kind = "transfers" if node.target in transfers.BY_FUNCTION and node.target is not transfers.cast else "activations"
            one = Storage(node, size(part), kind, position, position)
            self.storages.append(one)
            found.append((one,))
        self.of[node] = tuple(found)

    def shared(self, node: fx.Node) -> tuple[Storage, ...] | None:
        """Whose memory an op's results lie in; ``None`` where it is new."""
        values = operands(node)
        if not values:
            return None
        below = tuple(dict.fromkeys(one for part in self.of[values[0]] for one in part))
        row = transfers.BY_FUNCTION.get(node.target)
        if row is not None:
            return below if self.moves_nothing(node, values[0]) else None
        return below if isinstance(node.target, OpOverload) and (returns_alias(node.target) or node.target in HIDDEN_VIEWS) else None

    def moves_nothing(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether a transfer's result is in the memory of what it reads: an all-reduce of what nobody else reads, a piece of dim 0."""
        given = transfers.arguments(node.target, node.args, node.kwargs)
        if node.target is transfers.all_reduce:
            return len(value.users) == 1 and all(one.born != START for part in self.of[value] for one in part)
        if node.target is transfers.slice:
            return not given.get("parts") and given["dim"] == 0
        if node.target is transfers.cast:
            type = record_of(value).type
            return isinstance(type, TensorType) and type.dtype == given["dtype"]
        return node.target in (transfers.wait, transfers.send)


def size(type: ValueType) -> int:
    """Bytes of a value."""
    if isinstance(type, tuple):
        return sum(map(size, type))
    return 0 if type is None else math.prod(type.shape) * type.dtype.itemsize
