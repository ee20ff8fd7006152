"""Compute the lifetimes of the memory of a lowered function, as ``liveness`` does for a program.

A lowered function has memory that a program does not show: buckets, which copy what they send; gathers that start
early; the operands of collectives, which must be kept until the collective has ended; gradients that become their sums.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import Target

from autopar.ir.nodes import element_of, operands, record_of
from autopar.ir.program import Program
from autopar.optimizers import IN_PLACE, OFFLOADED
from autopar.report.liveness import START, Lifetimes, Storage, StorageWalk, is_view, size
from autopar.runtime.lowering import bucket_collectives as buckets
from autopar.runtime.lowering import collectives, local_transfers
from autopar.runtime.lowering.lower import Lowered
from autopar.runtime.lowering.side_streams import started_by
from autopar.torch_private import OpOverload, aten


class LoweredMemory(NamedTuple):
    """The memory of one call.

    Attributes:
        new: bytes of its results; ``None`` if they share the memory of its first operand.
        in_flight: bytes that it needs until something waits for the collective that it starts.
    """

    new: int | None
    in_flight: int = 0


Args = tuple[Any, ...]
Sizes = Callable[[Any], int]  # an operand, or several → their bytes


def _rows(places: Sequence[buckets.Place]) -> int:
    """Return the number of ranks for which a scattered bucket has a row."""
    whole = sum(math.prod(place[0]) for place in places)
    piece = sum(math.prod(place[2]) for place in places)
    return whole // max(piece, 1)


def _sent(args: Args, sizes: Sizes) -> int:
    """Return the bytes that a bucket copies. ``args``: its pieces, and their spans."""
    return sum(_of_span(sizes(piece), span) for piece, span in zip(args[0], args[1], strict=True))


def _of_span(bytes: int, span: buckets.Span) -> int:
    return bytes if span is None else bytes * (span[1] - span[0]) // max(span[2], 1)


def _of_member(element: fx.Node, bytes: int) -> int:
    """Return the bytes of one value of a tuple: its part of a bucket, of which all members are views."""
    value, k = element_of(element)
    members: Any = value.args[1] if len(value.args) > 1 else ()
    if value.target is buckets.finish_bucket:
        elements = [math.prod(shape) for shape in members]
    elif value.target is buckets.finish_scatter_bucket:
        elements = [math.prod(place[2]) for place in members]
    else:
        return bytes
    return bytes * elements[k] // max(1, sum(elements))


# functions whose results share the memory of the first operand
SHARING = {
    buckets.finish_bucket,
    buckets.finish_gather_bucket,  # its parts are new
    collectives.start_all_reduce_in_place,
    collectives.wait,
    torch.reshape,
    aten.add_.Tensor,
    *IN_PLACE.values(),
    *OFFLOADED.values(),
}
# others → its memory, from its arguments, the sizes of operands, and the bytes of its result; else the result is new
MEMORY: dict[Target, Callable[[Args, Sizes, int], LoweredMemory]] = {
    buckets.start_bucket: lambda args, sizes, own: LoweredMemory(_sent(args, sizes)),
    buckets.start_scatter_bucket: lambda args, sizes, own: LoweredMemory(
        sum(_of_span(sizes(piece), place[3]) for piece, place in zip(args[0], args[1], strict=True))
    ),
    buckets.finish_scatter_bucket: lambda args, sizes, own: LoweredMemory(sizes(args[0]) // _rows(args[1])),
    buckets.start_gather_bucket: lambda args, sizes, own: LoweredMemory(
        _sent(args, sizes) * args[2], _sent(args, sizes)
    ),
    collectives.finish_all_gather: lambda args, sizes, own: LoweredMemory(
        None if args[2] == 0 and len(set(args[3])) == 1 else own
    ),
    collectives.start_product: lambda args, sizes, own: LoweredMemory(sizes(args[0]) * args[1], sizes(args[0])),
    collectives.start_reduce_scatter: lambda args, sizes, own: LoweredMemory(sizes(args[0])),
    collectives.start_all_to_all: lambda args, sizes, own: LoweredMemory(own, sizes(args[0])),
    local_transfers.own_piece: lambda args, sizes, own: LoweredMemory(
        None if args[2] == 0 and tuple(args[1][1:]) == tuple(args[5][1:]) else own
    ),
}
GATHERS = (collectives.start_all_gather, buckets.start_gather_bucket, collectives.start_product)


def lifetimes(
    program: Program, lowered: Lowered, kept: Collection[str], kinds: Mapping[str, str], on_cpu: bool = True
) -> Lifetimes:
    """Return when each storage of a rank is in use; linear in the function.

    Args:
        program: the rank's local program, from which the function was made.
        kept: the placeholders that the caller keeps until the end.
        kinds: placeholder → one of ``KINDS``.
        on_cpu: whether gloo runs the gathers; it gathers into its own memory and copies from there.
    """
    return _Walk(program, lowered, kept, kinds, on_cpu).run()


class _Walk(StorageWalk):
    def __init__(
        self, program: Program, lowered: Lowered, kept: Collection[str], kinds: Mapping[str, str], on_cpu: bool
    ) -> None:
        super().__init__()
        self.program, self.lowered, self.kept, self.kinds, self.on_cpu = program, lowered, kept, kinds, on_cpu
        self.ops = [node for node in lowered.graph.nodes if node.op == "call_function"]
        # start of a collective → a storage that it needs until something waits for it
        self.in_flight: dict[fx.Node, Storage] = {}
        self.bytes: dict[fx.Node, int] = {}

    def run(self) -> Lifetimes:
        end, graph = len(self.ops), self.lowered.graph
        homes = {node.name: node for node in self.program.nodes if node.op in ("placeholder", "get_attr")}
        members: dict[str, list[fx.Node]] = {}
        for home in homes.values():
            if record_of(home).message:
                members.setdefault(record_of(home).message, []).append(home)
        for node in graph.find_nodes(op="placeholder"):
            home = homes[str(node.target)]  # FX may write node names in lower case
            message = members.get(record_of(home).message, [home])
            self.bytes[node] = sum(size(record_of(member).type) for member in message)
            stays = home.op == "get_attr" or home.name in self.kept
            kind = self.kinds.get(home.name, "buffers")
            self.of[node] = ((self.store(home, self.bytes[node], kind, START, end if stays else START),),)
        origin = self.program.output
        origins = []
        for position, node in enumerate(self.ops):
            origin = self.lowered.origins.get(node.name, origin)
            origins.append(origin)
            self.read_by(node, position)
            self.call(node, origin, position)
        self.read_by(graph.output_node(), end)
        self.mark_gradients()
        return Lifetimes(self.program, tuple(origins), tuple(self.storages))

    def mark_gradients(self) -> None:
        """Count a gradient that becomes a sum as a gradient and not as an activation.

        A sum that starts as zero is its first addend.
        """
        values = {node.name: node for node in self.ops}
        for node in self.program.nodes:
            home = node.args[0] if node.target is aten.add.Tensor else None
            if (
                not isinstance(home, fx.Node)
                or self.kinds.get(home.name) != "gradients"
                or home.name in self.lowered.takes
            ):
                continue
            for name in (node.name, *(value.name for value in operands(node)[1:])):
                for storage in self.all_of(values[name]) if name in values else ():
                    storage.kind = "gradients" if storage.born != START else storage.kind

    def read_by(self, node: fx.Node, position: int) -> None:
        for value in node.all_input_nodes:
            self.read(self.part(node) if node.target is operator.getitem else self.all_of(value), position)
            if value in self.in_flight:
                self.read([self.in_flight[value]], position)

    def part(self, element: fx.Node) -> tuple[Storage, ...]:
        """Return the storages of an element; all elements of a tuple of views share the same storages."""
        value, k = element_of(element)
        parts = self.of[value]
        return parts[k] if len(parts) > 1 else parts[0]

    def call(self, node: fx.Node, origin: fx.Node, position: int) -> None:
        values = node.all_input_nodes
        if node.target is operator.getitem and values[0].target is not buckets.finish_gather_bucket:
            self.of[node] = (self.part(node),)
            self.bytes[node] = _of_member(node, sum(storage.bytes for storage in self.of[node][0]))
            return
        type = record_of(origin).type if node.name in self.lowered.origins else None
        sizes = [size(part) for part in (type if isinstance(type, tuple) else (type,))]
        memory = self.memory(node, sum(sizes))
        if memory.new is None:
            self.of[node] = (self.all_of(values[0]) if values else (),)
            self.bytes[node] = sum(sizes) or (self.bytes[values[0]] if values else 0)
            return
        kind = "activations" if isinstance(node.target, OpOverload) else "transfers"
        rows = sizes if memory.new == sum(sizes) else [memory.new]
        self.of[node] = tuple((self.store(origin, bytes, kind, position),) for bytes in rows)
        self.bytes[node] = memory.new
        # gloo's own buffer; gloo frees it when all data has arrived, mostly before something waits
        if self.on_cpu and node.target in GATHERS:
            self.store(origin, memory.new, "transfers", position)
        if memory.in_flight:
            self.in_flight[node] = self.store(origin, memory.in_flight, "transfers", position)

    def memory(self, node: fx.Node, result_bytes: int) -> LoweredMemory:
        target = started_by(node.target)
        if target in MEMORY:
            return MEMORY[target](node.args, self.size, result_bytes)
        shares = target in SHARING or is_view(target)
        if target is torch.Tensor.to:
            shares = self.bytes[node.all_input_nodes[0]] == result_bytes
        return LoweredMemory(None if shares else result_bytes)

    def size(self, values: Any) -> int:
        return self.bytes[values] if isinstance(values, fx.Node) else sum(map(self.size, values))
