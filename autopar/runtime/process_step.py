"""Run a step on real processes as one autograd function, from this rank's pieces to this rank's pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autopar.ir.program import Program
from autopar.ir.streams import Groups
from autopar.runtime import anomaly, current_op
from autopar.runtime.interface import Interface
from autopar.runtime.lowering.lower import Lowered, lower
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.modes import as_captured
from autopar.runtime.picks import Pick, pick
from autopar.runtime.processes.agreement import Agreement, Brought
from autopar.runtime.wire.pacing import pacing_of

Gradient = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Picks:
    """What is handed from function to function, picked from rows of values.

    Attributes:
        taken: what the forward takes, from constants and arguments.
        states, next_states: the states, from the arguments; and their next values, as below.
        returned, saved: what is returned, and what the backward needs besides the gradients of outputs: from results of
            the forward, constants and arguments.
        boxed: what the backward takes, from the gradients of outputs and what was saved.
    """

    taken: Pick
    states: Pick
    next_states: Pick
    returned: Pick
    saved: Pick
    boxed: Pick

    @classmethod
    def of(cls, interface: Interface, constants: Sequence[str], phases: Mapping[str, Lowered]) -> _Picks:
        first, arguments = phases["forward"], interface.arguments
        takes = phases["backward"].takes if "backward" in phases else ()
        tangents = list(interface.tangents.values())
        needed = [name for name in takes if name not in tangents]
        row = [*first.gives, *constants, *arguments]
        return cls(
            taken=pick(first.takes, [*constants, *arguments]),
            states=pick(list(interface.states), arguments),
            next_states=pick([name for name, _ in interface.states.values()], row),
            returned=pick([name for name, _ in interface.returned], row),
            saved=pick(needed, row),
            boxed=pick(takes, [*tangents, *needed]),
        )


class ProcessStep:
    """The scheduled program of one rank, ready to run.

    A backward belongs to the set of returned values that have a gradient. This set is known only when the backward
    runs. So the forward runs for the set of the last call, or in the first call for the scalars (a loss) if there are
    any. If the set was wrong, the backward runs the forward again.

    Args:
        explicit: the program with Layouts.
        local: the scheduled program of this rank.
        specialize: returns the step for fewer gradients.
        groups: the names of the process groups.
        agreement: compares the calls of all ranks before the first collective of a step; ``None`` for one rank.
        device: the device on which it runs; the default is the CPU.
        regions: compiles its functions.
    """

    def __init__(
        self,
        explicit: Program,
        local: Program,
        specialize: Callable[[frozenset[int]], ProcessStep],
        *,
        groups: Groups,
        agreement: Agreement | None,
        device: torch.device | None = None,
        regions: Regions | None = None,
    ) -> None:
        self.interface = Interface.of(explicit)
        self.specialize = specialize
        self._explicit, self._local = explicit, local
        self._constants = {
            name: constant.tensor for name, constant in explicit.constants.items() if constant.tensor is not None
        }
        self._groups, self._agreement, self._device, self._regions = groups, agreement, device, regions
        self.tangents = frozenset(self.interface.tangents)
        scalars = frozenset(k for k in self.tangents if not self.interface.returned[k][1].shape)
        self.expected = scalars or self.tangents
        self.calls = 0

    @cached_property
    def phases(self) -> Mapping[str, Lowered]:
        """The functions of the phases, lowered on first use: most steps only ever run for fewer gradients."""
        gate = None if self._agreement is None else self._agreement.finish
        pacing = pacing_of(self._explicit)
        return lower(self._local, self._groups, gate, self._device, pacing=pacing, regions=self._regions)

    @cached_property
    def checked_phases(self) -> Mapping[str, Lowered]:
        """The functions of the phases with checks for NaN."""
        gate = None if self._agreement is None else self._agreement.finish
        return lower(self._local, self._groups, gate, self._device, hunt=anomaly.Hunt(self._local))

    @cached_property
    def _picks(self) -> _Picks:
        return _Picks.of(self.interface, tuple(self._constants), self.phases)

    def __call__(self, pieces: Sequence[torch.Tensor], leaves: Mapping[str, torch.Tensor], gradient: Gradient,
                 owners: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:  # fmt: skip
        """Run on this rank's pieces of parameters, buffers and inputs, in the order of the placeholders.

        Args:
            pieces: plain tensors; those of buffers are updated in place.
            leaves: placeholder → the user's tensor that receives its gradient.
            gradient: a function from a placeholder and the piece of its gradient to the gradient of that tensor.
            owners: the tensors that the pieces belong to, if autograd cannot detect a change of them on the pieces.
        """
        if not self.tangents:
            with as_captured():
                return self.forward(pieces)[0]
        return list(_Step.apply(self, pieces, tuple(leaves), gradient, owners, *leaves.values()))

    def forward(
        self, pieces: Sequence[torch.Tensor], *, keep_states: bool = True
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the pieces of the returned values, and the values that the backward needs, in its order."""
        constants = list(self._constants.values())
        results = self._run("forward", self._picks.taken([*constants, *pieces]))
        if self._agreement is not None:
            self._agreement.finish()
        row = [*results, *constants, *pieces]
        if keep_states:
            for piece, value in zip(self._picks.states(pieces), self._picks.next_states(row), strict=True):
                piece.copy_(value)
        return _distinct(self._picks.returned(row)), self._picks.saved(row)

    def backward(self, saved: list[torch.Tensor], gradients: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the piece of each gradient, by placeholder. This empties ``saved``, to free memory early."""
        if "backward" not in self.phases:
            if self._agreement is not None:
                self._agreement.finish()
            return {}
        boxed = self._picks.boxed([*(gradients[k].contiguous() for k in self.interface.tangents), *saved])
        saved.clear()
        results = dict(zip(self.phases["backward"].gives, self._run("backward", boxed), strict=True))
        if self._agreement is not None:
            self._agreement.finish()
        return {placeholder: results[name] for placeholder, (name, _) in self.interface.gradients.items()}

    def _agree_on_backward(self, serial: int, gradients: Mapping[int, torch.Tensor]) -> None:
        """Check that all ranks run the backward of the same call, from the same outputs, with the same gradients."""
        if self._agreement is None:
            return
        returned = self.interface.returned
        brought = [
            Brought(f"the gradient of output {k}", gradients[k], tuple(returned[k][1].attr.axes))
            for k in sorted(gradients)
        ]
        outputs = ", ".join(map(str, sorted(gradients)))
        self._agreement.begin(
            f"backward of call {serial} from its outputs {outputs}", brought, f"backward from {outputs}"
        )

    def _run(self, phase: str, boxed: list[Any]) -> list[torch.Tensor]:
        current_op.tick()
        return (self.checked_phases if anomaly.is_on() else self.phases)[phase].run(boxed)


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view for a tensor that is returned twice, so that each has its own gradient."""
    seen: set[int] = set()
    distinct = []
    for tensor in tensors:
        distinct.append(tensor.view_as(tensor) if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return distinct


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: ProcessStep, pieces: Sequence[torch.Tensor], names: tuple[str, ...],
                gradient: Gradient, owners: Sequence[torch.Tensor],
                *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:  # fmt: skip
        whole.calls += 1
        step = whole if whole.expected == whole.tangents else whole.specialize(whole.expected)
        before = {
            k: pieces[k].clone() for k, name in enumerate(step.interface.arguments) if name in step.interface.states
        }
        with as_captured():
            outputs, saved = step.forward(pieces)
        ctx.whole, ctx.step, ctx.names, ctx.gradient, ctx.kept = whole, step, names, gradient, len(saved)
        ctx.serial = whole.calls
        ctx.save_for_backward(*saved, *(before.get(k, piece) for k, piece in enumerate(pieces)), *owners)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k not in whole.tangents))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a captured step is differentiated once: its gradients cannot be differentiated again, "
                "so create_graph=True is refused; take such a penalty on the model itself, without autopar"
            )
        saved = list(ctx.saved_tensors)
        pieces = saved[ctx.kept : ctx.kept + len(ctx.step.interface.arguments)]
        del saved[ctx.kept :]
        ctx.maybe_clear_saved_tensors()  # so that the backward frees what it has read, unless retain_graph=True
        present = {k: gradient for k, gradient in enumerate(gradients) if gradient is not None}
        none = (None,) * (5 + len(ctx.names))
        if not present:
            return none
        step: ProcessStep = ctx.step
        step._agree_on_backward(ctx.serial, present)
        with as_captured():
            if present.keys() != step.tangents:
                positions = frozenset(present)
                ctx.whole.expected = positions
                step = ctx.whole if positions == ctx.whole.tangents else ctx.whole.specialize(positions)
                _, saved = step.forward(pieces, keep_states=False)
            del pieces
            results = step.backward(saved, present)
            return (*none[:5], *(ctx.gradient(name, results[name]) if name in results else None for name in ctx.names))
