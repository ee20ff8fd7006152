"""List the parts of a forward between which it can be cut into stages, with their seconds and bytes.

A part is a block of the model (``layers.0``), or a module that is in no block, as far as its ops stand side by side. So
layers stay whole, and what is before, between and behind them can go to either side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.capture.blocks import block_of, blocks, module_paths
from autopar.costs.machine import Machine
from autopar.costs.op_prices import OpPrices
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.rules.binding import bind_node

STATES = 4  # a parameter, the sum of its gradients, and two states of Adam


@dataclass(frozen=True)
class Unit:
    """A part of the forward that stays on one stage.

    Attributes:
        name: the path of its module; empty for the root.
        nodes: its ops of the forward, in order.
        seconds: of its forward and backward, on one device.
        held: bytes of its parameters, their sums of gradients and their optimizer's states.
        activations: bytes of the results of its forward.
        crossing: bytes that travel forward if the forward is cut before it.
        is_block: whether it is a block of the model, or a part of one.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    seconds: float
    held: int
    activations: int
    crossing: int
    is_block: bool = False


def units_of(program: Program, ops: Sequence[fx.Node], machine: Machine) -> list[Unit]:
    """Return the units of a traced micro-batch. Linear in the graph.

    Args:
        ops: the ops of the forward that run on one stage each, in order.
        machine: whose figures price the ops.
    """
    path = block_of(program)
    runs = [(name, tuple(nodes)) for name, nodes in itertools.groupby(ops, path)]
    number = {node: k for k, (_, nodes) in enumerate(runs) for node in nodes}
    calls = {record_of(node).call: k for node, k in number.items() if record_of(node).call is not None}
    seconds, held, activations = [0.0] * len(runs), [0] * len(runs), [0] * len(runs)
    for node in program.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        at = number.get(node, calls.get(record_of(node).call))
        if at is not None:
            seconds[at] += _seconds(node, machine)
            activations[at] += bytes_of(node) if node in number else 0
    for node in program.placeholders:
        readers = [number[user] for user in node.users if user in number]
        if record_of(node).role == "param" and readers:
            held[min(readers)] += STATES * bytes_of(node)
    crossing = _crossing(ops, number, len(runs))
    repeated = blocks(module_paths(program))
    columns = zip(runs, seconds, held, activations, crossing, strict=True)
    return [
        Unit(name, nodes, time, own, kept, sent, name in repeated) for (name, nodes), time, own, kept, sent in columns
    ]


def _crossing(ops: Sequence[fx.Node], number: Mapping[fx.Node, int], count: int) -> list[int]:
    """Return the bytes that are made before each unit, and read in it or behind it."""
    changes = [0] * (count + 1)
    for node in ops:
        last = max((number[user] for user in node.users if user in number), default=number[node])
        if last > number[node]:
            changes[number[node] + 1] += bytes_of(node)
            changes[last + 1] -= bytes_of(node)
    return list(itertools.accumulate(changes[:count]))


def _seconds(node: fx.Node, machine: Machine) -> float:
    """Return the seconds of a traced op on one device."""
    bound = bind_node(node)
    needs = record_of(node).uses or (None,) * len(operands(node))
    pairs = zip(operands(node), needs, strict=True)
    read = [need.dtype if need is not None else _type(value).dtype for value, need in pairs if _is_tensor(value)]
    types = record_of(node).type
    results = [None if type is None else type.dtype for type in (types if isinstance(types, tuple) else (types,))]
    return OpPrices(bound, None, read, results, machine).price({}) / 1e9


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(record_of(node).type, TensorType)


def _type(node: fx.Node) -> TensorType:
    type = record_of(node).type
    assert isinstance(type, TensorType)
    return type


def bytes_of(node: fx.Node) -> int:
    """Return the bytes of a value on one device; 0 for a tuple, whose elements are counted."""
    type = record_of(node).type
    return math.prod(type.shape) * type.dtype.itemsize if isinstance(type, TensorType) else 0
