"""Price what ends a training step, for the search of its micro-batch.

The update of a parameter follows from two homes: the sum of its gradients is reduced to the layout of the optimizer's
state, the optimizer's ops run there, and the new parameter goes to its home:

    w_grad : f32[64 32] +dp           all_reduce, reduce_scatter, … → f32[64 32/dp]
    w : f32[64 32]                    slice → f32[64 32/dp]
    adamw(w, w_grad, …)               on pieces f32[64 32/dp]
    w : f32[64 32]                    all_gather → f32[64 32]

The layout of the optimizer's state follows from the home of the parameter, as a stage of ZeRO says. Then the price of
an ending is a table over pairs (home of the parameter, home of the sum). Or it is chosen too, for each parameter: then
the price is a table over pairs (state, sum), and one over pairs (home, state).
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
from autopar.search.transfer_prices.least_chains import AnyChains


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
        trained: the parameters that are updated; of others only the gradient is measured.
        chooses: whether the layout of the optimizer's state is chosen for each of them; else ``state_of`` gives it.
    """

    microbatches: int
    state_of: Callable[[DistAttr, Sequence[int]], DistAttr]
    updates: Mapping[str, tuple[UpdateOp, ...]]
    kept: Mapping[str, torch.dtype]
    stays: bool
    states: Mapping[str, tuple[TensorType, ...]] = field(default_factory=dict)
    together: bool = False
    remedies: tuple[str, ...] = ()
    trained: frozenset[str] = frozenset()
    chooses: bool = False

    def nanoseconds(
        self, chains: AnyChains, parameter: str, type: TensorType, homes: Sequence[DistAttr],
        sums: Sequence[DistAttr], summed: torch.dtype,
    ) -> np.ndarray:  # fmt: skip
        """Return the nanoseconds of the update of a parameter: [homes, homes of the sum of its gradients].

        Args:
            chains: with ``LeastChains`` the nanoseconds are a bound, here and in all other methods.
            type: of the parameter.
            summed: the dtype of the sum.
        """
        if parameter not in self.updates:
            return np.zeros((len(homes), len(sums)))
        states = [self.state_of(home, type.shape) for home in homes]
        different = list(dict.fromkeys(states))
        rows = self.updated(chains, parameter, type, different, sums, summed)
        moved = [self.moved(chains, parameter, type, [h], [s])[0, 0] for h, s in zip(homes, states, strict=True)]
        return rows[[different.index(state) for state in states]] + np.array(moved)[:, None]

    def updated(
        self, chains: AnyChains, parameter: str, type: TensorType, states: Sequence[DistAttr], sums: Sequence[DistAttr],
        summed: torch.dtype,
    ) -> np.ndarray:  # fmt: skip
        """Return the nanoseconds in which a sum is reduced and a parameter updated: [layouts of the state, sums]."""
        rows = []
        for state in states:
            ops = sum(_op_price(op, type.shape, state, chains) for op in self.updates[parameter])
            rows.append([ops + chains.nanoseconds(type.shape, (sum_, summed), (state, summed)) for sum_ in sums])
        return np.array(rows, dtype=np.float64)

    def moved(
        self, chains: AnyChains, parameter: str, type: TensorType, homes: Sequence[DistAttr], states: Sequence[DistAttr]
    ) -> np.ndarray:
        """Return the nanoseconds in which a parameter goes to the layout of its state, and the new one to its home.

        [homes, layouts of the state]. A parameter that is kept in another dtype is in the layout of its state already.
        """
        if parameter not in self.trained:
            return np.zeros((len(homes), len(states)))
        own, kept = type.dtype, self.kept.get(parameter)
        back = chains.prices(type.shape, [(s, kept or own) for s in states], [(home, own) for home in homes]).T
        if kept is not None:
            return back.astype(np.float64)
        there = chains.prices(type.shape, [(home, own) for home in homes], [(s, own) for s in states])
        return (there + back).astype(np.float64)

    def price(
        self, chains: AnyChains, parameter: str, type: TensorType, home: DistAttr, state: DistAttr, sum_: DistAttr,
        summed: torch.dtype,
    ) -> int:  # fmt: skip
        """Return the nanoseconds of the update of a parameter in given layouts."""
        if parameter not in self.updates:
            return 0
        updated = self.updated(chains, parameter, type, [state], [sum_], summed)
        return int(updated[0, 0] + self.moved(chains, parameter, type, [home], [state])[0, 0])

    def of_loss(self, chains: AnyChains, type: TensorType, sums: Sequence[DistAttr]) -> np.ndarray:
        """Return the nanoseconds of the reduction of the loss, for each home of its sum."""
        whole = DistAttr.replicated(len(type.shape))
        reduced = [chains.nanoseconds(type.shape, (home, type.dtype), (whole, type.dtype)) for home in sums]
        return np.array(reduced, dtype=np.float64)


def _op_price(op: UpdateOp, shape: tuple[int, ...], state: DistAttr, chains: AnyChains) -> int:
    def layout(own: tuple[int, ...] | None) -> DistAttr | None:
        return None if own is None else state if own == shape else DistAttr.replicated(len(own))

    needs = [layout(own) or DistAttr(()) for own in op.bound.operand_shapes]
    split = op.bound.splits(needs, [layout(own) for own in op.bound.result_shapes], chains.mesh)
    return OpPrices(op.bound, chains.mesh, op.reads, op.writes, chains.machine).price(split)
