"""Count the floating point operations of a model, and the seconds that they take at the peak of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.machine import Machine
from autopar.costs.op_prices import dtype_of_work
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, record_of
from autopar.ir.program import Program
from autopar.rules.binding import bind_node

AGAIN = "_again"  # ends the name of a value that the backward computes again


@dataclass(frozen=True)
class ModelWork:
    """The work of a model: of all ranks together, each op once on whole tensors.

    Attributes:
        flops: floating point operations; a product of m × k and k × n has 2 m k n.
        seconds: what they take on one device of the machine at the peaks of their dtypes.
    """

    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: ModelWork) -> ModelWork:
        return ModelWork(self.flops + other.flops, self.seconds + other.seconds)

    def times(self, count: int) -> ModelWork:
        return ModelWork(count * self.flops, count * self.seconds)


def model_work(program: Program, machine: Machine) -> ModelWork:
    """Return the work of the ops of an explicit program that have work in their rules (``autopar.rules.registry``).

    Work that a plan adds does not count: what several ranks compute alike counts once, and what the backward computes
    again does not count a second time.
    """
    total = ModelWork()
    names = {node.name for node in program.nodes}
    for node in program.nodes:
        if node.op != "call_function" or is_getitem(node) or node.target in transfers.BY_FUNCTION:
            continue
        before, again, _ = node.name.rpartition(AGAIN)
        if again and before in names:
            continue
        bound = bind_node(node)
        if bound.terms:
            flops = sum(term.count(bound.sizes) for term in bound.terms)
            dtype = dtype_of_work(bound, [need.dtype for need in record_of(node).uses if need is not None])
            total += ModelWork(flops, flops / machine.flops(dtype))
    return total
