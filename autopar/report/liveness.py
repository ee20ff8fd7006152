"""Compute when a rank's memory holds each value of its program.

One walk follows the order of execution. Memory of a value is allocated by its op and freed after its last reader, as in
the functions that run the program; a view keeps its base alive. Memory that the caller holds stays: parameters, inputs,
returned values, gradients. A state's next value is written into the state's memory, or replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import element_of, is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType, ValueType
from autopar.ir.value_names import gradient_name, gradient_parameter
from autopar.torch_private import OpOverload, aten, returns_alias

KINDS = ("parameters", "gradients", "optimizer state", "buffers", "inputs", "under way", "activations", "transfers")
OF_ROLE = {"param": "parameters", "buffer": "buffers", "state": "buffers", "tangent": "activations"}  # others: inputs
START = -1  # before the first op

HIDDEN_VIEWS = {aten._unsafe_view.default}  # these share memory, although their schemas do not say so


def is_view(target: object) -> bool:
    """Return whether an op's result shares the memory of its first operand."""
    return isinstance(target, OpOverload) and (returns_alias(target) or target in HIDDEN_VIEWS)


@dataclass(eq=False)
class Storage:
    """A piece of memory.

    Attributes:
        node: the value that it was allocated for; views of it share it.
        bytes: its size on this rank.
        kind: one of ``KINDS``.
        born, dies: positions in ``Lifetimes.ops`` of the op that makes it and of its last reader. ``START`` is before
            the first op, the number of ops is after the last.
    """

    node: fx.Node
    bytes: int
    kind: str
    born: int
    dies: int


@dataclass(frozen=True)
class Lifetimes:
    """The storages of a program with the ops that make and read them; ``liveness`` returns it.

    Attributes:
        ops: the nodes that run, in order.
        storages: all storages, in the order of allocation.
        of: value → the storages of each of its elements; empty for a lowered function.
    """

    program: Program
    ops: tuple[fx.Node, ...]
    storages: tuple[Storage, ...]
    of: Mapping[fx.Node, tuple[tuple[Storage, ...], ...]] = field(default_factory=dict, repr=False)

    def held(self) -> list[int]:
        """Return the bytes in use while each op runs, including its operands and results."""
        changes = [0] * (len(self.ops) + 1)
        total = 0
        for storage in self.storages:
            if storage.born == START:
                total += storage.bytes
            else:
                changes[storage.born] += storage.bytes
            if storage.dies < len(self.ops):
                changes[storage.dies + 1] -= storage.bytes
        in_use = []
        for change in changes[: len(self.ops)]:
            total += change
            in_use.append(total)
        return in_use

    def at(self, position: int) -> Iterator[Storage]:
        """Iterate over the storages in use while an op runs."""
        return (storage for storage in self.storages if storage.born <= position <= storage.dies)


def liveness(
    program: Program,
    kept: Collection[str] | None = None,
    kinds: Mapping[str, str] | None = None,
    *,
    in_place: bool = True,
) -> Lifetimes:
    """Return when each piece of a rank's memory is in use. Linear in the graph.

    Temporary buffers of torch's kernels, collectives and buckets are not counted.
    Args:
        program: the program of one rank: level ``local`` or ``scheduled``.
        kept: the placeholders that the caller holds to the end; by default all but tangents and states that are not
            written in place.
        kinds: placeholder → one of ``KINDS``, for those whose role and name do not show it.
        in_place: whether next values of states are written into the states' memory.

    Raises:
        ValueError: the program is not local, or has no placeholder of that name.
    """
    if program.level not in ("local", "scheduled"):
        raise ValueError(
            f"liveness takes the program of one rank, in the shapes of its pieces; this one is {program.level}: "
            f"localize it"
        )
    return _Walk(program, kept, kinds or {}, in_place).run()


class StorageWalk:
    """What a walk over ops knows: the storages so far, and which of them each element of a value uses."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.of: dict[fx.Node, tuple[tuple[Storage, ...], ...]] = {}

    def store(self, node: fx.Node, bytes: int, kind: str, born: int, dies: int | None = None) -> Storage:
        """Add a storage. ``dies``: where it is not read by ops alone."""
        storage = Storage(node, bytes, kind, born, born if dies is None else dies)
        self.storages.append(storage)
        return storage

    def read(self, storages: Iterable[Storage], position: int) -> None:
        """Let an op read storages."""
        for storage in storages:
            storage.dies = max(storage.dies, position)

    def all_of(self, value: fx.Node) -> tuple[Storage, ...]:
        """Return the storages of all elements of a value."""
        return tuple(dict.fromkeys(storage for part in self.of[value] for storage in part))


class _Walk(StorageWalk):
    def __init__(
        self, program: Program, kept: Collection[str] | None, kinds: Mapping[str, str], in_place: bool
    ) -> None:
        super().__init__()
        self.program, self.kinds, self.in_place = program, kinds, in_place
        self.placeholders = {node.name: node for node in program.placeholders}
        if unknown := (set(kept or ()) | set(kinds)) - set(self.placeholders):
            raise ValueError(f"the program has no placeholder {min(unknown)!r}; it has {', '.join(self.placeholders)}")
        given_up = {"tangent"} if in_place else {"tangent", "state"}
        self.kept = (
            {name for name, n in self.placeholders.items() if record_of(n).role not in given_up}
            if kept is None
            else set(kept)
        )
        self.names = {name_of(node) for node in self.placeholders.values()}
        self.ops = [node for node in program.nodes if node.op == "call_function"]
        self.donated: dict[tuple[fx.Node, int], fx.Node] = {}  # (op, element) → the state whose next value it is

    def run(self) -> Lifetimes:
        output = self.program.output
        rows = list(zip(operands(output), record_of(output).results, strict=True))
        for value, result in rows:
            if result.kind == "state" and value.op == "call_function" and self.in_place:
                self.donated[element_of(value) if is_getitem(value) else (value, 0)] = self.placeholders[result.of]
        end = len(self.ops)
        for node in self.program.nodes:
            if node.op == "placeholder" or node.op == "get_attr":
                self.hold(node, end)
        for position, node in enumerate(self.ops):
            for operand in operands(node):
                self.read(self.all_of(operand), position)
            self.make(node, position)
        for value, result in rows:
            self.read(self.all_of(value), end)
            for storage in self.of[value][0]:
                if result.kind != "return" and storage.kind in ("activations", "transfers"):
                    storage.kind = (
                        "gradients" if result.kind == "grad" else self.of[self.placeholders[result.of]][0][0].kind
                    )
        return Lifetimes(self.program, tuple(self.ops), tuple(self.storages), self.of)

    def hold(self, node: fx.Node, end: int) -> None:
        record = record_of(node)
        lives = node.op == "get_attr" or node.name in self.kept
        kind = self.kind(node, record)
        self.of[node] = ((self.store(node, size(record.type), kind, START, end if lives else START),),)

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

    def make(self, node: fx.Node, position: int) -> None:
        type = record_of(node).type
        parts = type if isinstance(type, tuple) else (type,)
        if is_getitem(node):
            source, index = element_of(node)
            self.of[node] = (self.of[source][index],)
            return
        shared = self.shared(node)
        element_storages: list[tuple[Storage, ...]] = []
        for k, part in enumerate(parts):
            state = self.donated.get((node, k))
            if state is not None:
                element_storages.append(self.of[state][0])
                continue
            if shared is not None:
                element_storages.append(shared)
                continue
            kind = (
                "transfers"
                if node.target in transfers.BY_FUNCTION and node.target is not transfers.cast
                else "activations"
            )
            element_storages.append((self.store(node, size(part), kind, position),))
        self.of[node] = tuple(element_storages)

    def shared(self, node: fx.Node) -> tuple[Storage, ...] | None:
        """Return the storages that an op's results share with its operand; ``None`` if they are new."""
        values = operands(node)
        if not values:
            return None
        operand_storages = self.all_of(values[0])
        row = transfers.BY_FUNCTION.get(node.target)
        if row is not None:
            return operand_storages if self.moves_nothing(node, values[0]) else None
        return operand_storages if is_view(node.target) else None

    def moves_nothing(self, node: fx.Node, value: fx.Node) -> bool:
        """Return whether a transfer's result shares its operand's memory.

        An all-reduce without other readers does, and so does a piece of dim 0.
        """
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        if node.target is transfers.all_reduce:
            return len(value.users) == 1 and all(storage.born != START for storage in self.all_of(value))
        if node.target is transfers.slice:
            return not arguments.get("parts") and arguments["dim"] == 0
        if node.target is transfers.cast:
            type = record_of(value).type
            return isinstance(type, TensorType) and type.dtype == arguments["dtype"]
        return node.target in (transfers.wait, transfers.send)


def size(type: ValueType) -> int:
    """Return the bytes of a value."""
    if isinstance(type, tuple):
        return sum(map(size, type))
    return 0 if type is None else math.prod(type.shape) * type.dtype.itemsize
