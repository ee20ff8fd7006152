"""Make the ops of a schedule from an explicit program: one for each of its ops and transfers.

    gathered : f32[8 4] = all_gather(w, 0, tp)   →   Op("gathered", "tp", 2.1e-05, (), bytes=64, kind=("all_gather", …))
    y : f32[16 4] = mm(x, gathered)              →   Op("y", "compute", 5.3e-06, ("gathered",), memory=256)

Seconds, bytes and memory are those of the largest piece, so that all ranks decide the same. A collective is on the
stream of its axes, ``"tp"`` or ``"dp tp"``. An op that overwrites a state, such as an update, comes after all earlier
readers of its memory, through views too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from autopar.costs.op_prices import VIEWS
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, node_at, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.optimizers import IN_PLACE
from autopar.rules.binding import bind_node
from autopar.scheduling.op import COMPUTE, Op
from autopar.scheduling.programs.donated import written_over
from autopar.scheduling.programs.functions import Function, is_collective
from autopar.scheduling.programs.memory_readers import MemoryReaders
from autopar.scheduling.programs.shared import may_share, piece_bytes


def program_ops(
    program: Program, function: Function, seconds: Mapping[str, float], overwriting: Collection[fx.Node] = ()
) -> list[Op]:
    """Return the ops of a function of an explicit program, in the order of the program. Linear in the graph.

    Args:
        seconds: value → the seconds of the op that computes it.
        overwriting: the ops that write the next value of a state into its memory.
    """
    reads = Reads(program, overwriting)
    inside = {node.name for node in function.nodes}
    return [
        _op(node, seconds.get(node.name, 0.0), [name for name in reads.of(node) if name in inside],
            [name for name in reads.overwrites.get(node, ()) if name in inside])
        for node in function.nodes
        if node.op == "call_function" and not is_getitem(node)
    ]  # fmt: skip


def _op(node: fx.Node, seconds: float, after: list[str], behind: list[str]) -> Op:
    if not is_collective(node):
        return Op(node.name, COMPUTE, seconds, after, memory=0 if is_view(node) else _held(node), behind=behind)
    axes = transfers.axes_along(node.target, tensor_type(operands(node)[0]), arguments_of(node), tensor_type(node))
    stream = " ".join(axes or tensor_type(node).mesh.names)  # parts of a dim may be split anew along the same axes
    kind = transfers.BY_FUNCTION[node.target].name, arguments_of(node).get("op", "sum"), tensor_type(node).dtype
    size = piece_bytes(tensor_type(operands(node)[0])) if may_share(node) else 0
    return Op(node.name, stream, seconds, after, size, kind, 0 if is_view(node) else _held(node), behind)


def arguments_of(node: fx.Node) -> dict[str, object]:
    return transfers.arguments(node.target, node.args, node.kwargs)


def is_view(node: fx.Node) -> bool:
    """Return whether the result of an op is in the memory of its first operand: a view, a piece of dim 0, or an
    all-reduce whose operand has no other reader, so that it is reduced in place."""
    if node.target is transfers.all_reduce:
        return _is_last_of(operands(node)[0])
    if node.target is transfers.slice:
        return arguments_of(node)["dim"] == 0 and not arguments_of(node).get("parts")
    return node.target not in transfers.BY_FUNCTION and bind_node(node).rule.op in VIEWS


def _is_last_of(value: fx.Node) -> bool:
    """Return whether a value has its own memory and one reader."""
    if value.op != "call_function" or is_getitem(value) or len(value.users) > 1:
        return False
    return not is_view(value) or _is_last_of(operands(value)[0])


def _held(node: fx.Node) -> int:
    """Return the bytes of the largest pieces of an op's results."""
    types = record_of(node).type
    return sum(piece_bytes(type) for type in (types if isinstance(types, tuple) else (types,)) if type is not None)


class Reads:
    """Finds the ops that a node reads, and in ``overwrites`` the earlier readers of the memory that it overwrites."""

    def __init__(self, program: Program, overwriting: Collection[fx.Node]) -> None:
        self.base: dict[fx.Node, tuple[str, ...]] = {}  # value → its op, and those whose memory it is a view of
        self.overwrites = _overwrites(program, overwriting)

    def of(self, node: fx.Node) -> list[str]:
        """Return the names of the ops that a node reads."""
        found: dict[str, None] = {}
        for value in operands(node):
            found |= dict.fromkeys(self.bases(value))
        found.pop(node.name, None)
        return list(found)

    def bases(self, value: fx.Node) -> tuple[str, ...]:
        """Return the names of the op that computes a value, and of those whose memory the value is a view of."""
        if is_getitem(value):
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self.bases(source)
        if value.op != "call_function":
            return ()
        if value not in self.base:
            self.base[value] = (
                value.name,
                *(self.bases(operands(value)[0]) if operands(value) and is_view(value) else ()),
            )
        return self.base[value]


def _overwrites(program: Program, overwriting: Collection[fx.Node]) -> dict[fx.Node, list[str]]:
    """Map each op that overwrites memory to the earlier readers of that memory: an op that writes the next value of a
    state, and an update in place."""
    placeholders = {node.name: node for node in program.placeholders}
    place = {node: k for k, node in enumerate(program.nodes)}
    readers = MemoryReaders(program)
    found: dict[fx.Node, dict[str, None]] = {}

    def overwrite(op: fx.Node, value: fx.Node) -> None:
        earlier = [reader.name for reader in readers.of(value) if place[reader] < place[op]]
        found.setdefault(op, {}).update(dict.fromkeys(earlier))

    for value, result in zip(operands(program.output), record_of(program.output).results, strict=True):
        while is_getitem(value):
            value = node_at(value)
        if result.kind == "state" and value in overwriting:
            overwrite(value, placeholders[result.of])
    for node in program.nodes:
        for value in written_over(node) if node.target in IN_PLACE else ():
            overwrite(node, value)
    return {op: list(names) for op, names in found.items()}
