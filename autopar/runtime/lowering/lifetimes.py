"""Lifetimes of a lowered function: what ``liveness`` is for a program, in the order in which the function runs.

It sees what a program does not say: buckets, which hold a copy of what they send; gathers that begin ahead; the operands of collectives,
which are held until these are waited for; gradients that become their sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.optimizers import IN_PLACE, OFFLOADED
from autopar.report.liveness import HIDDEN_VIEWS, START, Lifetimes, Storage, size
from autopar.runtime.lowering import buckets, collectives, lower
from autopar.runtime.lowering.lower import Lowered
from autopar.torch_private import OpOverload, returns_alias

aten = torch.ops.aten


class LoweredMemory(NamedTuple):
    """What one call does to memory.

    Attributes:
        new: bytes of its results; ``None``: they lie where its first operand does.
        held: bytes that it needs until what it starts is waited for.
    """

    new: int | None
    held: int = 0


Args = tuple[Any, ...]
Sizes = Callable[[Any], int]  # an operand, or several → their bytes

def _rows(places: Sequence[buckets.Place]) -> int:
    """Of how many ranks a scattered bucket has a row."""
    whole, own = (sum(math.prod(one[k]) for one in places) for k in (0, 2))
    return whole // max(own, 1)


MEMORY: dict[Callable[..., Any], Callable[[Args, Sizes, int], LoweredMemory]] = {  # function → of its arguments, and the bytes of the value it makes
    buckets.start_bucket: lambda args, sizes, own: LoweredMemory(sizes(args[0])),
    buckets.finish_bucket: lambda args, sizes, own: LoweredMemory(None),
    buckets.start_scatter_bucket: lambda args, sizes, own: LoweredMemory(sizes(args[0])),
    buckets.finish_scatter_bucket: lambda args, sizes, own: LoweredMemory(sizes(args[0]) // _rows(args[1])),
    buckets.start_gather_bucket: lambda args, sizes, own: LoweredMemory(sizes(args[0]) * args[1], sizes(args[0])),
    buckets.finish_gather_bucket: lambda args, sizes, own: LoweredMemory(None),  # its parts are new
    operator.getitem: lambda args, sizes, own: LoweredMemory(own),
    collectives.start_all_reduce: lambda args, sizes, own: LoweredMemory(own),
    collectives.start_all_reduce_in_place: lambda args, sizes, own: LoweredMemory(None),
    collectives.wait: lambda args, sizes, own: LoweredMemory(None),
    collectives.start_all_gather: lambda args, sizes, own: LoweredMemory(own),
    collectives.finish_all_gather: lambda args, sizes, own: LoweredMemory(None if args[2] == 0 and len(set(args[3])) == 1 else own),
    collectives.start_product: lambda args, sizes, own: LoweredMemory(sizes(args[0]) * args[1], sizes(args[0])),
    collectives.start_reduce_scatter: lambda args, sizes, own: LoweredMemory(sizes(args[0])),
    collectives.finish_reduce_scatter: lambda args, sizes, own: LoweredMemory(own),
    collectives.start_all_to_all: lambda args, sizes, own: LoweredMemory(own, sizes(args[0])),
    lower.own_piece: lambda args, sizes, own: LoweredMemory(None if args[2] == 0 and tuple(args[1][1:]) == tuple(args[5][1:]) else own),
    torch.reshape: lambda args, sizes, own: LoweredMemory(None),
    aten.add_.Tensor: lambda args, sizes, own: LoweredMemory(None),
}

GATHERS = (collectives.start_all_gather, buckets.start_gather_bucket, collectives.start_product)


def lifetimes(program: Program, lowered: Lowered, kept: Collection[str], kinds: Mapping[str, str], on_cpu: bool = True) -> Lifetimes:
    """When each piece of a rank's memory is in use; linear in the function.

    Args:
        program: that of the rank, of which the function was made.
        kept: the placeholders that the caller holds to the end.
        kinds: placeholder → one of ``KINDS``.
        on_cpu: whether gloo gathers, into memory of its own, from which it copies.
    """
    return _Walk(program, lowered, kept, kinds, on_cpu).run()


class _Walk:
    def __init__(self, program: Program, lowered: Lowered, kept: Collection[str], kinds: Mapping[str, str], on_cpu: bool) -> None:
        self.program, self.lowered, self.kept, self.kinds, self.on_cpu = program, lowered, kept, kinds, on_cpu
        self.ops = [node for node in lowered.graph.nodes if node.op == "call_function"]
        self.storages: list[Storage] = []
        self.parts: dict[fx.Node, tuple[tuple[Storage, ...], ...]] = {}  # value → what each of its parts lies in
        self.held: dict[fx.Node, Storage] = {}  # by a collective, until it is waited for
        self.bytes: dict[fx.Node, int] = {}

    def run(self) -> Lifetimes:
        end, graph = len(self.ops), self.lowered.graph
        homes = {node.name: node for node in self.program.nodes if node.op in ("placeholder", "get_attr")}
        for node in graph.find_nodes(op="placeholder"):
            home = homes[str(node.target)]  # FX writes names of its own in small letters
            self.bytes[node] = size(record_of(home).type)
            lives = home.op == "get_attr" or home.name in self.kept
            self.parts[node] = ((self.store(home, self.bytes[node], self.kinds.get(home.name, "buffers"), START, end if lives else START),),)
        made = self.program.output
        stands = []
        for position, node in enumerate(self.ops):
            made = self.lowered.made.get(node.name, made)
            stands.append(made)
            self.read(node, position)
            self.call(node, made, position)
        self.read(graph.output_node(), end)
        self.tell_gradients()
        return Lifetimes(self.program, tuple(stands), tuple(self.storages))

    def tell_gradients(self) -> None:
        """A sum that begins with zero is the gradient that is added to it."""
        values = {node.name: node for node in self.ops}
        for node in self.program.nodes:
            home = node.args[0] if node.target is aten.add.Tensor else None
            if not isinstance(home, fx.Node) or self.kinds.get(home.name) != "gradients" or home.name in self.lowered.takes:
                continue
            for name in (node.name, *(value.name for value in operands(node)[1:])):
                for one in (one for part in self.parts.get(values.get(name), ()) for one in part):  # type: ignore[arg-type]
                    one.kind = "gradients" if one.born != START else one.kind

    def read(self, node: fx.Node, position: int) -> None:
        for value in node.all_input_nodes:
            parts = (self.part(node),) if node.target is operator.getitem else self.parts[value]
            for one in (*(one for part in parts for one in part), *((self.held[value],) if value in self.held else ())):
                one.dies = max(one.dies, position)

    def part(self, element: fx.Node) -> tuple[Storage, ...]:
        """What an element lies in; a tuple of views lies in one place."""
        value, k = element.args
        parts = self.parts[value]  # type: ignore[index]
        return parts[k] if len(parts) > 1 else parts[0]  # type: ignore[index]

    def call(self, node: fx.Node, made: fx.Node, position: int) -> None:
        values = node.all_input_nodes
        if node.target is operator.getitem and values[0].target is not buckets.finish_gather_bucket:
            self.parts[node] = (self.part(node),)
            self.bytes[node] = sum(one.bytes for one in self.parts[node][0])
            return
        type = record_of(made).type if node.name in self.lowered.made else None
        sizes = [size(one) for one in (type if isinstance(type, tuple) else (type,))]
        memory = self.memory(node, sum(sizes))
        if memory.new is None:
            below = tuple(dict.fromkeys(one for part in self.parts[values[0]] for one in part)) if values else ()
            self.parts[node] = (below,)
            self.bytes[node] = sum(sizes) or (self.bytes[values[0]] if values else 0)
            return
        kind = "activations" if isinstance(node.target, OpOverload) else "transfers"
        rows = sizes if memory.new == sum(sizes) else [memory.new]
        self.parts[node] = tuple((self.store(made, one, kind, position, position),) for one in rows)
        self.bytes[node] = memory.new
        if self.on_cpu and node.target in GATHERS:  # gloo's own, which goes as soon as all has come, and mostly before it is waited for
            self.store(made, memory.new, "transfers", position, position)
        if memory.held:
            self.held[node] = self.store(made, memory.held, "transfers", position, position)

    def memory(self, node: fx.Node, own: int) -> LoweredMemory:
        row = MEMORY.get(node.target)  # type: ignore[arg-type]
        if row is not None:
            return row(node.args, self.size, own)
        if node.target is torch.Tensor.to:
            return LoweredMemory(None if self.bytes[node.all_input_nodes[0]] == own else own)
        if isinstance(node.target, OpOverload):
            return LoweredMemory(None if returns_alias(node.target) or node.target in HIDDEN_VIEWS else own)
        return LoweredMemory(None) if node.target in (*IN_PLACE.values(), *OFFLOADED.values()) else LoweredMemory(own)

    def size(self, values: Any) -> int:
        return self.bytes[values] if isinstance(values, fx.Node) else sum(map(self.size, values))

    def store(self, made: fx.Node, bytes: int, kind: str, born: int, dies: int) -> Storage:
        one = Storage(made, bytes, kind, born, dies)
        self.storages.append(one)
        return one
