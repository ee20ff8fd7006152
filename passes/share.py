"""Share one transfer between uses that need the same Layout of one value, within a phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from autopar.capture.blocks import block_of, is_parameter, reader_of
from autopar.ir import transfers
from autopar.ir.nodes import map_operands, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes.manager import Pass
from autopar.plan.shared_transfers import REDUCTIONS, computed, narrows, turning_block


@dataclass(frozen=True)
class Share(Pass):
    """Merge equal transfers of the same value.

        x_tp : f32[32 64] = all_gather(x, 0, tp)                x_tp : f32[32 64] = all_gather(x, 0, tp)
        a : f32[32 8] = mm(x_tp, v)                     →       a : f32[32 8] = mm(x_tp, v)
        x_tp_1 : f32[32 64] = all_gather(x, 0, tp)              b : f32[32 8] = mm(x_tp, w)
        b : f32[32 8] = mm(x_tp_1, w)

    Transfers are not shared across phases, with the exceptions of ``autopar.plan.shared_transfers``.
    """

    name: ClassVar[str] = "share"
    takes: ClassVar[str] = "explicit"
    gives: ClassVar[str] = "explicit"

    def run(self, program: Program) -> None:
        first: dict[Any, fx.Node] = {}
        representative: dict[fx.Node, fx.Node] = {}
        turning, reducing = _gathers_of_turning_block(program), _leading_to_reductions(program)
        with program.edit() as edit:
            for node in program.nodes:
                if node.target not in transfers.BY_FUNCTION:
                    continue
                args = map_operands(node.args, lambda n: representative.get(n, n))
                phase = (
                    ""
                    if node in reducing or _narrows(node)
                    else "forward"
                    if node in turning
                    else record_of(node).phase
                )
                key = (node.target, _hashable(args), _hashable(node.kwargs), phase)
                representative[node] = twin = first.setdefault(key, node)
                if twin is not node:
                    edit.replace_all_uses(node, twin)
                    edit.erase(node)


def _leading_to_reductions(program: Program) -> set[fx.Node]:
    """Return the reductions, and the transfers of what is then reduced."""
    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.target in REDUCTIONS or (node.target in transfers.BY_FUNCTION and not found.isdisjoint(node.users)):
            found.add(node)
    return found


def _narrows(node: fx.Node) -> bool:
    """Return whether a cast reduces the bytes of a value that an op computes."""
    (value,) = operands(node)
    source, result = record_of(value).type, record_of(node).type
    if node.target is not transfers.cast or not isinstance(source, TensorType) or not isinstance(result, TensorType):
        return False
    return narrows(source, result) and computed(value)


def _gathers_of_turning_block(program: Program) -> set[fx.Node]:
    """Return the backward's gathers of parameters that the block reads with which the forward ends."""
    block, turning = block_of(program), turning_block(program)
    return {
        node
        for node in program.nodes
        if node.target is transfers.all_gather
        and record_of(node).phase != "forward"
        and is_parameter(operands(node)[0])
        and block(reader_of(node)) == turning
    }


def _hashable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_hashable(v) for v in value)
    return tuple(sorted((k, _hashable(v)) for k, v in value.items())) if isinstance(value, dict) else value
