"""A step on real processes: this rank's pieces in, this rank's pieces out, as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from autopar.ir.program import Program
from autopar.runtime import anomaly, current_op
from autopar.runtime.interface import Interface
from autopar.runtime.lowering.buckets import largest_pieces
from autopar.runtime.lowering.lower import Lowered, lower
from autopar.runtime.modes import as_captured
from autopar.runtime.processes.agreement import Agreement, Brought

Gradient = Callable[[str, torch.Tensor], torch.Tensor]


class ProcessStep:
    """The local program of one rank, ready to run.

    A backward belongs to a set of returned values that have a gradient. Which these are is known only when it runs, so
    the forward of the last such set is run; the first time, of the scalars (a loss) if there are any. Where that was
    wrong, the forward runs again.

    Args:
        explicit: the program with Layouts.
        local: the program of this rank.
        specialize: gives the step for fewer gradients.
        groups: ranks, in ascending order → the name of their process group.
        agreement: what the ranks have called, compared before a step's first collective; ``None`` for one rank.
    """

    def __init__(
        self,
        explicit: Program,
        local: Program,
        specialize: Callable[[frozenset[int]], ProcessStep],
        *,
        groups: Mapping[tuple[int, ...], str],
        agreement: Agreement | None,
    ) -> None:
        self.interface = Interface.of(explicit)
        self.specialize = specialize
        self._local = local
        self._constants = {
            name: constant.tensor for name, constant in explicit.constants.items() if constant.tensor is not None
        }
        self._bytes = largest_pieces(explicit)
        self._groups, self._agreement = groups, agreement
        self.tangents = frozenset(self.interface.tangents)
        scalars = frozenset(k for k in self.tangents if not self.interface.returned[k][1].shape)
        self.expected = scalars or self.tangents
        self.calls = 0

    @cached_property
    def phases(self) -> Mapping[str, Lowered]:
        """Made when they are run: most steps only ever run for fewer gradients."""
        return lower(self._local, self._groups, None if self._agreement is None else self._agreement.finish, self._bytes)

    @cached_property
    def looking(self) -> Mapping[str, Lowered]:
        """The same, which look for NaN."""
        gate = None if self._agreement is None else self._agreement.finish
        return lower(self._local, self._groups, gate, self._bytes, hunt=anomaly.Hunt(self._local))

    def __call__(self, pieces: Sequence[torch.Tensor], leaves: Mapping[str, torch.Tensor], gradient: Gradient,
                 owners: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:  # fmt: skip
        """Run on this rank's pieces of parameters, buffers and inputs, in the order of the placeholders.

        Args:
            pieces: plain tensors; those of buffers are updated in place.
            leaves: placeholder → the tensor of the user's that receives its gradient.
            gradient: makes of a placeholder and its gradient's piece what that tensor receives.
            owners: the tensors of which pieces are, where a change of them does not show on the pieces.
        """
        if not self.tangents:
            with as_captured():
                return self.forward(pieces)[0]
        return list(_Step.apply(self, pieces, tuple(leaves), gradient, owners, *leaves.values()))  # type: ignore[no-untyped-call]

    def forward(self, pieces: Sequence[torch.Tensor], *, keep_states: bool = True) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The pieces of the returned values, and what the backward needs, in the order in which it takes it."""
        phases, values = self.phases, dict(zip(self.interface.given, pieces, strict=True))
        first = phases["forward"]
        made = dict(zip(first.gives, self._run("forward", [self._constants.get(n, values.get(n)) for n in first.takes]), strict=True))
        if self._agreement is not None:
            self._agreement.finish()
        if keep_states:
            for of, (name, _) in self.interface.states.items():
                values[of].copy_(made[name])
        returned = [made[name] for name, _ in self.interface.returned]
        if "backward" not in phases:
            return _distinct(returned), []
        tangents = set(self.interface.tangents.values())
        saved = [made.get(n, self._constants.get(n, values.get(n))) for n in phases["backward"].takes if n not in tangents]
        return _distinct(returned), saved  # type: ignore[return-value]

    def backward(self, saved: list[torch.Tensor], gradients: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Placeholder → the piece of its gradient. ``saved`` is emptied on the way."""
        if "backward" not in self.phases:
            if self._agreement is not None:
                self._agreement.finish()
            return {}
        tangents = {name: gradients[k].contiguous() for k, name in self.interface.tangents.items()}
        last = self.phases["backward"]
        rest = iter(saved)
        boxed = [tangents[name] if name in tangents else next(rest) for name in last.takes]
        saved.clear()
        del rest
        made = dict(zip(last.gives, self._run("backward", boxed), strict=True))
        if self._agreement is not None:
            self._agreement.finish()
        return {of: made[name] for of, (name, _) in self.interface.gradients.items()}

    def _agree_on_backward(self, serial: int, found: Mapping[int, torch.Tensor]) -> None:
        """All ranks go back through the same call, from the same outputs, with the same gradients."""
        if self._agreement is None:
            return
        returned = self.interface.returned
        brought = [Brought(f"the gradient of output {k}", found[k], tuple(returned[k][1].attr.axes)) for k in sorted(found)]
        outputs = ", ".join(map(str, sorted(found)))
        self._agreement.begin(f"backward of call {serial} from its outputs {outputs}", brought, f"backward from {outputs}")

    def _run(self, phase: str, boxed: list[Any]) -> list[torch.Tensor]:
        current_op.tick()
        return (self.looking if anomaly.is_on() else self.phases)[phase].run(boxed)


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor that is returned twice, as two: each has a gradient of its own."""
    seen: set[int] = set()
    return [t.view_as(t) if id(t) in seen or seen.add(id(t)) else t for t in tensors]


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: ProcessStep, pieces: Sequence[torch.Tensor], names: tuple[str, ...],
                gradient: Gradient, owners: Sequence[torch.Tensor], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:  # fmt: skip
        whole.calls += 1
        step = whole if whole.expected == whole.tangents else whole.specialize(whole.expected)
        before = {k: pieces[k].clone() for k, name in enumerate(step.interface.given) if name in step.interface.states}
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
        pieces = saved[ctx.kept : ctx.kept + len(ctx.step.interface.given)]
        del saved[ctx.kept :]
        ctx.maybe_clear_saved_tensors()  # those that the backward has read are freed on the way, but for retain_graph=True
        found = {k: gradient for k, gradient in enumerate(gradients) if gradient is not None}
        none = (None,) * (5 + len(ctx.names))
        if not found:
            return none
        step: ProcessStep = ctx.step
        step._agree_on_backward(ctx.serial, found)
        with as_captured():
            if found.keys() != step.tangents:
                given = frozenset(found)
                ctx.whole.expected = given
                step = ctx.whole if given == ctx.whole.tangents else ctx.whole.specialize(given)
                _, saved = step.forward(pieces, keep_states=False)
            del pieces
            made = step.backward(saved, found)
            return (*none[:5], *(ctx.gradient(name, made[name]) if name in made else None for name in ctx.names))
