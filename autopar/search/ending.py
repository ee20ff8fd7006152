"""Price what ends a training step, for the search of its micro-batch.

The update of a parameter follows from two homes: the sum of its gradients is reduced to the layout of the optimizer's
state, the optimizer's ops run there, and the new parameter goes to its home:

    w_grad : f32[64 32] +dp           all_reduce, reduce_scatter, … → f32[64 32/dp]
    w : f32[64 32]                    slice → f32[64 32/dp]
    adamw(w, w_grad, …)               on pieces f32[64 32/dp]
    w : f32[64 32]                    all_gather → f32[64 32]

So the price of an ending is a table over pairs (home of the parameter, home of the sum).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from autopar.costs.op_prices import OpPrices
from autopar.ir.layout import DistAttr
from autopar.ir.record import TensorType
from autopar.rules.strategies import Bound
from autopar.search.chains import Chains


class UpdateOp(NamedTuple):
    """One op of the update of a parameter. Operands and results of the parameter's shape have the state's layout.

    Attributes:
        bound: its rule, bound to the call.
        reads: the dtype of each operand.
        writes: the dtype of each result.
    """

    bound: Bound
    reads: tuple[torch.dtype, ...]
    writes: tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class Ending:
    """How a step ends after its micro-batches.

    Attributes:
        microbatches: the number of micro-batches that one ending follows.
        state_of: returns the layout of the optimizer's state, from the home and the shape of its parameter.
        updates: parameter → the ops that update it; parameters that are not trained are left out.
        kept: the dtype in which a parameter is updated, where the micro-batch takes a low-precision copy of it.
        stays: whether parameters move in the update alone. Otherwise their uses may gather them, as in ZeRO 3.
        states: parameter → what the optimizer keeps of it on the device, beside itself.
        together: whether all gradients are reduced before any parameter is updated, as for their norm.
        remedies: options of the step that would take less memory.
    """

    microbatches: int
    state_of: Callable[[DistAttr, Sequence[int]], DistAttr]
    updates: Mapping[str, tuple[UpdateOp, ...]]
    kept: Mapping[str, torch.dtype]
    stays: bool
    states: Mapping[str, tuple[TensorType, ...]] = field(default_factory=dict)
    together: bool = False
    remedies: tuple[str, ...] = ()

    def nanoseconds(
        self, chains: Chains, parameter: str, type: TensorType, homes: Sequence[DistAttr], sums: Sequence[DistAttr],
        summed: torch.dtype,
    ) -> np.ndarray:  # fmt: skip
        """Return the nanoseconds of the update of a parameter: [homes, homes of the sum of its gradients].

        Args:
            type: of the parameter.
            summed: the dtype of the sum.
        """
        if parameter not in self.updates:
            return np.zeros((len(homes), len(sums)))
        shape, states = type.shape, [self.state_of(home, type.shape) for home in homes]
        rows = {}
        for state in dict.fromkeys(states):
            ops = sum(_op_price(op, shape, state, chains) for op in self.updates[parameter])
            row = [chains.nanoseconds(shape, (sum_, summed), (state, summed)) for sum_ in sums]
            rows[state] = np.array(row, dtype=np.float64) + ops
        dtype = self.kept.get(parameter, type.dtype)
        moved = [
            chains.nanoseconds(shape, (state, dtype), (home, type.dtype))
            + (0 if parameter in self.kept else chains.nanoseconds(shape, (home, dtype), (state, dtype)))
            for state, home in zip(states, homes, strict=True)
        ]
        return np.stack([rows[state] for state in states]) + np.array(moved, dtype=np.float64)[:, None]

    def of_loss(self, chains: Chains, type: TensorType, sums: Sequence[DistAttr]) -> np.ndarray:
        """Return the nanoseconds of the reduction of the loss, for each home of its sum."""
        whole = DistAttr.replicated(len(type.shape))
        reduced = [chains.nanoseconds(type.shape, (home, type.dtype), (whole, type.dtype)) for home in sums]
        return np.array(reduced, dtype=np.float64)


def _op_price(op: UpdateOp, shape: tuple[int, ...], state: DistAttr, chains: Chains) -> int:
    def layout(own: tuple[int, ...] | None) -> DistAttr | None:
        return None if own is None else state if own == shape else DistAttr.replicated(len(own))

    needs = [layout(own) or DistAttr(()) for own in op.bound.operand_shapes]
    split = op.bound.splits(needs, [layout(own) for own in op.bound.result_shapes], chains.mesh)
    return OpPrices(op.bound, chains.mesh, op.reads, op.writes, chains.machine).price(split)
