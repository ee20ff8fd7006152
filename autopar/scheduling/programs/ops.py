"""Make the ops that are scheduled from an explicit program: an op for each of its ops and transfers.

    gathered : f32[8 4] = all_gather(w, 0, tp)   →   Op("gathered", "tp", 2.1e-05, (), bytes=64, kind=("all_gather", …))
    y : f32[16 4] = mm(x, gathered)              →   Op("y", "compute", 5.3e-06, ("gathered",), memory=256)

Seconds, bytes and memory are those of the largest piece, so that all ranks decide the same. A collective is on the
stream of its axes, ``"tp"`` or ``"dp tp"``. An op that computes the next value of a state may overwrite the state; so
it comes after all that reads the value before, through views too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autopar.costs.op_prices import VIEWS
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.rules.binding import bind_node
from autopar.scheduling.op import COMPUTE, Op
from autopar.scheduling.programs.functions import Function, is_collective
from autopar.scheduling.programs.shared import may_share, piece_bytes


def program_ops(program: Program, function: Function, seconds: Mapping[str, float]) -> list[Op]:
    """Return the ops of a function of an explicit program, in the order of the program. Linear in the graph.

    Args:
        seconds: value → the seconds of what computes it.
    """
    reads = Reads(program)
    inside = {node.name for node in function.nodes}
    return [
        _op(node, seconds.get(node.name, 0.0), [name for name in reads.of(node) if name in inside])
        for node in function.nodes
        if node.op == "call_function" and not is_getitem(node)
    ]


def _op(node: fx.Node, seconds: float, after: list[str]) -> Op:
    if not is_collective(node):
        return Op(node.name, COMPUTE, seconds, after, memory=0 if is_view(node) else _held(node))
    axes = transfers.axes_along(node.target, tensor_type(operands(node)[0]), arguments_of(node), tensor_type(node))
    stream = " ".join(axes)
    kind = transfers.BY_FUNCTION[node.target].name, arguments_of(node).get("op", "sum"), tensor_type(node).dtype
    size = piece_bytes(tensor_type(operands(node)[0])) if may_share(node) else 0
    return Op(node.name, stream, seconds, after, size, kind, _held(node))


def arguments_of(node: fx.Node) -> dict[str, object]:
    return transfers.arguments(node.target, node.args, node.kwargs)


def is_view(node: fx.Node) -> bool:
    """Return whether the result of an op is in the memory of its first operand."""
    return node.target not in transfers.BY_FUNCTION and bind_node(node).rule.op in VIEWS


def _held(node: fx.Node) -> int:
    types = record_of(node).type
    return sum(piece_bytes(type) for type in (types if isinstance(types, tuple) else (types,)) if type is not None)


class Reads:
    """Finds the ops that must be over before a node begins."""

    def __init__(self, program: Program) -> None:
        self.base: dict[fx.Node, tuple[str, ...]] = {}  # value → the op that computes it, and those whose memory it is
        self.overwrites = _overwrites(program)

    def of(self, node: fx.Node) -> list[str]:
        found: dict[str, None] = {}
        for value in operands(node):
            found |= dict.fromkeys(self.bases(value))
        found |= dict.fromkeys(self.overwrites.get(node, ()))
        found.pop(node.name, None)
        return list(found)

    def bases(self, value: fx.Node) -> tuple[str, ...]:
        if is_getitem(value):
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self.bases(source)
        if value.op != "call_function":
            return ()
        if value not in self.base:
            self.base[value] = (value.name, *(self.bases(operands(value)[0]) if is_view(value) else ()))
        return self.base[value]


def _overwrites(program: Program) -> dict[fx.Node, list[str]]:
    """Map each op that computes the next value of a state to the earlier readers of the value before."""
    placeholders = {node.name: node for node in program.placeholders}
    place = {node: k for k, node in enumerate(program.nodes) if node.op == "call_function"}
    found: dict[fx.Node, list[str]] = {}
    for value, result in zip(operands(program.output), record_of(program.output).results, strict=True):
        while is_getitem(value):
            value = value.args[0]  # type: ignore[assignment]
        if result.kind == "state" and value.op == "call_function":
            readers = _readers(placeholders[result.of])
            found.setdefault(value, []).extend(user.name for user in readers if place[user] < place[value])
    return found


def _readers(value: fx.Node) -> Iterable[fx.Node]:
    """Yield the ops that read the memory of a value, through views too."""
    for user in value.users:
        if user.op == "call_function":
            yield user
            if not is_getitem(user) and is_view(user):
                yield from _readers(user)
