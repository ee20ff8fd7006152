"""Make the ops that are scheduled from an explicit program: an op for each of its ops and transfers, with its price.

    gathered : f32[8 4] = all_gather(w, 0, tp)   →   Op("gathered", "tp", 2.1e-05, (), bytes=64, kind=("all_gather", …))
    y : f32[16 4] = mm(x, gathered)              →   Op("y", "compute", 5.3e-06, ("gathered",), memory=256)

Prices, bytes and memory are those of the largest piece, so that all ranks decide the same. A collective is on the
stream of its axes, ``"tp"`` or ``"dp tp"``. An op that computes the next value of a state may overwrite the state; so
it comes after all that reads the value before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from torch import fx

from autopar.costs.machine import Machine, machine_from
from autopar.costs.op_prices import VIEWS
from autopar.costs.program_price import node_prices
from autopar.errors import ScheduleError, shown
from autopar.ir import transfers
from autopar.ir.layout import span
from autopar.ir.nodes import is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.rules.binding import bind_node
from autopar.scheduling.graph import near
from autopar.scheduling.op import COMPUTE, Op

SHARED = (transfers.all_reduce, transfers.reduce_scatter, transfers.all_gather)  # may be cut, and share a message
PLAIN = ("sum", "max", "min")  # reductions that a backend carries out as they are


def program_ops(
    program: Program, machine: Machine | str | Path, durations: Mapping[str, float] | None = None
) -> list[Op]:
    """Return the ops of an explicit program in program order. Linear in the graph.

    Args:
        program: an explicit program.
        machine: the machine whose prices are the seconds, its name, or the path of a machine file.
        durations: node → seconds, which replace the prices.

    Raises:
        ValueError: the program is not explicit, or there is no such machine.
        ScheduleError: ``durations`` names a node that the program does not have.
    """
    seconds = {node.name: price / 1e9 for node, price in node_prices(program, machine_from(machine))}
    for name in durations or {}:
        if name not in seconds:
            raise ScheduleError(f"durations has {shown(name)}, which is no op of the program{near(name, seconds)}")
    seconds |= durations or {}
    reads = _Reads(program)
    return [_op(node, seconds[node.name], reads.of(node)) for node in program.nodes if node.name in seconds]


def _op(node: fx.Node, seconds: float, after: list[str]) -> Op:
    stream = stream_of(node)
    if stream == COMPUTE:
        is_view = node.target not in transfers.BY_FUNCTION and bind_node(node).rule.op in VIEWS
        return Op(node.name, stream, seconds, after, memory=0 if is_view else _held(node))
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    source = record_of(operands(node)[0]).type
    assert isinstance(source, TensorType)
    kind = transfers.BY_FUNCTION[node.target].name, stream, arguments.get("op", "sum"), source.dtype
    return Op(node.name, stream, seconds, after, shared_bytes(node), kind, _held(node))


def stream_of(node: fx.Node) -> str:
    """Return the axes of a collective, ``"dp tp"``; ``"compute"`` for what computes, and for messages of stages."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None or not row.collective or row.function in (transfers.send, transfers.recv):
        return COMPUTE
    arguments = transfers.arguments(row.function, node.args, node.kwargs)
    return " ".join(transfers.axes_of(arguments["axis"])) or COMPUTE


def shared_bytes(node: fx.Node) -> int:
    """Return the bytes of a collective that can be cut and share a message: of its operand's largest piece; else 0.

    Reductions can in their own dtype, and all of them only with pieces of one size.
    """
    source, result = record_of(operands(node)[0]).type, record_of(node).type
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    assert isinstance(source, TensorType) and isinstance(result, TensorType)
    if node.target not in SHARED or not (_is_even(source) and _is_even(result)):
        return 0
    if node.target is not transfers.all_gather:
        kind = arguments.get("op", "sum")
        if kind not in PLAIN or transfers.reduced_as(kind, source.dtype) != source.dtype:
            return 0
    return piece_bytes(source)


def _is_even(type: TensorType) -> bool:
    """Whether all pieces of a value have one size."""
    if type.layout is None:
        return True
    mesh = type.layout.mesh
    return all(size % mesh.count(axes) == 0 for size, axes in type.attr.parts(type.shape))


def piece_bytes(type: TensorType) -> int:
    """Return the bytes of a value's largest piece."""
    if type.layout is None:
        return math.prod(type.shape) * type.dtype.itemsize
    mesh = type.layout.mesh
    first = dict.fromkeys(mesh.sizes, 0)
    parts = type.attr.parts(type.shape)
    return math.prod(span(size, axes, mesh, first)[1] for size, axes in parts) * type.dtype.itemsize


def _held(node: fx.Node) -> int:
    types = record_of(node).type
    return sum(piece_bytes(type) for type in (types if isinstance(types, tuple) else (types,)) if type is not None)


class _Reads:
    """Finds the ops that must be over before a node begins."""

    def __init__(self, program: Program) -> None:
        self.base: dict[fx.Node, tuple[str, ...]] = {}  # value → the op that computes it, and those whose memory it is
        self.overwrites = _overwrites(program)

    def of(self, node: fx.Node) -> list[str]:
        found: dict[str, None] = {}
        for value in operands(node):
            found |= dict.fromkeys(self.bases(value))
        own = {node.name}
        for earlier in self.overwrites.get(node, ()):
            found |= dict.fromkeys(name for name in self.bases(earlier)[:1] if name not in own)
        return list(found)

    def bases(self, value: fx.Node) -> tuple[str, ...]:
        if is_getitem(value):
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self.bases(source)
        if value.op != "call_function":
            return ()
        if value not in self.base:
            is_view = value.target not in transfers.BY_FUNCTION and bind_node(value).rule.op in VIEWS
            self.base[value] = (value.name, *(self.bases(operands(value)[0]) if is_view else ()))
        return self.base[value]


def _overwrites(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Map each op that computes the next value of a state to the earlier readers of the value before."""
    states = {name_of(node): node for node in program.placeholders}
    place = {node: k for k, node in enumerate(program.nodes) if node.op == "call_function"}
    found: dict[fx.Node, list[fx.Node]] = {}
    for value, result in zip(operands(program.output), record_of(program.output).results, strict=True):
        while is_getitem(value):
            value = value.args[0]  # type: ignore[assignment]
        if result.kind == "state" and result.of in states and value.op == "call_function":
            users = states[result.of].users
            found.setdefault(value, []).extend(user for user in users if place.get(user, math.inf) < place[value])
    return found
