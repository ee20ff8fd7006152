"""Fold several transfers in a row into the cheapest transfers with the same result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar.costs.machine import Machine
from autopar.costs.prices import step_price
from autopar.errors import TransitionError
from autopar.ir import transfers
from autopar.ir.computed_again import computed_again
from autopar.ir.edit import Value
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.passes.manager import Pass
from autopar.plan.shared_transfers import REDUCTIONS
from autopar.transitions import duration, transitions

FOLDED = frozenset(transfers.BY_FUNCTION) - {transfers.cast, transfers.send, transfers.recv, transfers.wait}


@dataclass(frozen=True)
class Fold(Pass):
    """Replace a chain of transfers by the transition from its first value to its last type, if that is cheaper.

        x_dp : f32[8 4] = all_gather(x, 0, dp)
        x_dp_dp : f32[8 4/dp] = slice(x_dp, 1, dp)            →      x_dp_1 : f32[8 4/dp] = all_to_all(x, 0, 1, dp)
        y : f32[8 4/dp] = relu(x_dp_dp)                              y : f32[8 4/dp] = relu(x_dp_1)

    Such chains are a gather and a slice over the same axis, a transfer and its inverse, or two transitions in a row.
    A single transition has none of them: they come from edits, from programs written by hand, and where two transitions
    meet. A transfer with other readers stays, so its bytes do not count. Chains do not cross phases, and contain no
    casts, which round. A pending value is reduced once: a reduction of a value that is read elsewhere, too, stays.

    Attributes:
        machine: the machine whose nanoseconds are compared; without one the bytes of the worst rank are.
    """

    name: ClassVar[str] = "fold"
    takes: ClassVar[str] = "explicit"
    gives: ClassVar[str] = "explicit"

    machine: Machine | None = None

    def run(self, program: Program) -> None:
        chains: dict[fx.Node, list[fx.Node]] = {}  # a transfer → the transfers of its phase before it, and itself
        staying = _staying(program)
        with program.edit() as edit:
            for node in program.nodes:
                if node.target in FOLDED:
                    (operand,) = operands(node)
                    before = chains.get(operand, [])
                    chains[node] = [*(before if record_of(operand).phase == record_of(node).phase else []), node]
            for node, chain in chains.items():
                if len(chain) < 2 or all(user in chains and chains[user][:-1] == chain for user in node.users):
                    continue  # a single transfer, or the chain goes on
                if not staying.isdisjoint(chain):
                    continue  # reshard has chosen what follows it together with the other uses
                unshared = _unshared(chain)
                (value,) = operands(chain[0])
                have, want = record_of(value).type, record_of(node).type
                assert isinstance(have, TensorType) and isinstance(want, TensorType)
                try:
                    steps = transitions(have, want, self.machine)
                except TransitionError:  # a pending maximum cannot become a pending sum
                    continue
                new = sum(step.bytes for step in steps) if self.machine is None else duration(have, want, self.machine)
                if (new, len(steps)) >= (sum([_paid(old, self.machine) for old in unshared]), len(unshared)):
                    continue
                moved: Value = value
                for step in steps:
                    args, kwargs = transfers.call(step.function, moved, dict(step.arguments))
                    moved = edit.insert(step.function, args, kwargs, before=node, phase=record_of(node).phase)
                edit.replace_all_uses(node, moved)
                for old in unshared:
                    edit.erase(old)


def _staying(program: Program) -> set[fx.Node]:
    """Return the reductions of values that others read, or that are computed again."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in program.nodes:
        if node.target in REDUCTIONS:
            value = operands(node)[0]
            while value.target in transfers.BY_FUNCTION:
                (value,) = operands(value)
            roots[node] = value
    numbers = computed_again(program, dict.fromkeys(roots.values()))
    users = Counter(numbers.get(value, value) for value in dict.fromkeys(roots.values()) for _ in value.users)
    return {node for node, value in roots.items() if users[numbers.get(value, value)] > 1}


def _unshared(chain: list[fx.Node]) -> list[fx.Node]:
    """Return the end of a chain that nothing outside of the chain reads."""
    start = len(chain) - 1
    while start and len(chain[start - 1].users) == 1:
        start -= 1
    return chain[start:]


def _paid(node: fx.Node, machine: Machine | None) -> int:
    """Return the bytes or the nanoseconds of a transfer."""
    source, result = record_of(operands(node)[0]).type, record_of(node).type
    assert isinstance(source, TensorType) and isinstance(result, TensorType)
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    if machine is None:
        return transfers.received(node.target, source, arguments, result)
    return round(step_price(node.target, source, arguments, result, machine) * 1e9)
