"""Run a step on real processes as one autograd function, from this rank's pieces to this rank's pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch

from autopar.ir.program import Program
from autopar.ir.streams import Groups
from autopar.runtime.interface import Interface
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.modes import as_captured
from autopar.runtime.processes.agreement import Agreement, Brought
from autopar.runtime.running.carriers import to_the_end
from autopar.runtime.running.functions import LoweredFunctions, Lowering, PlacedProgram
from autopar.runtime.running.programs import CallProgram, output_name
from autopar.runtime.running.rank import RankRun, Tensors
from autopar.timetable import Entry, Position, Timetable

Gradient = Callable[[str, torch.Tensor], torch.Tensor]
# the lines of a call
FORWARD = Entry("call", "forward", takes=("inputs",), hands=("kept",))
BACKWARD = Entry("call", "backward", takes=("inputs", "kept"), empties=("inputs", "kept"))
KEPT = ("call", None, None)


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
        self._groups, self._agreement, self._regions = groups, agreement, regions
        self._device = torch.device("cpu") if device is None else device
        self.tangents = frozenset(self.interface.tangents)
        scalars = frozenset(k for k in self.tangents if not self.interface.returned[k][1].shape)
        self.expected = scalars or self.tangents
        self.calls = 0

    @cached_property
    def program(self) -> CallProgram:
        """The program of this rank; its functions are lowered on first use: most steps only run for fewer gradients."""
        gate = None if self._agreement is None else self._agreement.finish
        placed = PlacedProgram(self._explicit, {self._local.rank: self._local})
        how = Lowering(self._groups, self._device, gate, self._regions)
        return CallProgram(LoweredFunctions(placed, self._local.rank, how))

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
        return list(_ProcessCall.apply(self, pieces, tuple(leaves), gradient, owners, *leaves.values()))

    def forward(
        self, pieces: Sequence[torch.Tensor], *, keep_states: bool = True
    ) -> tuple[list[torch.Tensor], Tensors]:
        """Return the pieces of the returned values, and what the backward takes besides them, by name."""
        run = self._run(pieces)
        to_the_end(run.call(FORWARD, ""))
        self._gate()
        if keep_states:
            for name, value in run.written.items():
                run.held[name].copy_(value)
        outputs = run.outputs[None, None]
        return _distinct([outputs[output_name(k)] for k in range(len(outputs))]), run.kept[KEPT]

    def backward(
        self, pieces: list[torch.Tensor], kept: Tensors, gradients: Mapping[int, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the piece of each gradient, by placeholder. This empties ``pieces``, to free memory early."""
        run = self._run(pieces)
        run.batches = run.held | {of: gradients[k].contiguous() for k, of in self.interface.tangents.items()}
        run.kept[KEPT] = kept
        run.held = {}
        pieces.clear()
        made = to_the_end(run.run_part(self.program, BACKWARD, "", zeros=False, empties=("batches",)))
        self._gate()
        found = self.program.results("backward").gradients
        return {placeholder: made[value] for placeholder, value in found.items() if value in made}

    def _run(self, pieces: Sequence[torch.Tensor]) -> RankRun:
        given = dict(zip(self.interface.arguments, pieces, strict=True))
        return RankRun({("call", None): self.program}, given, {}, self._device, lambda entry: ("", nullcontext()))

    def _gate(self) -> None:
        if self._agreement is not None:
            self._agreement.finish()

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


def timetable_of_call(program: Program) -> Timetable:
    """Return the timetable of a call: its forward, and its backward if it has one."""
    assert program.mesh is not None
    lines = (FORWARD, BACKWARD) if Interface.of(program).tangents else (FORWARD,)
    return Timetable(0, (Position(tuple(program.mesh.ranks), (), lines),))


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view for a tensor that is returned twice, so that each has its own gradient."""
    seen: set[int] = set()
    distinct = []
    for tensor in tensors:
        distinct.append(tensor.view_as(tensor) if id(tensor) in seen else tensor)
        seen.add(id(tensor))
    return distinct


def refuse_second_derivative() -> None:
    """Raise ``RuntimeError`` in a backward whose gradients shall be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a captured step is differentiated once: its gradients cannot be differentiated again, "
            "so create_graph=True is refused; take such a penalty on the model itself, without autopar"
        )


class _ProcessCall(torch.autograd.Function):
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
        ctx.whole, ctx.step, ctx.names, ctx.gradient, ctx.kept = whole, step, names, gradient, tuple(saved)
        ctx.serial = whole.calls
        ctx.save_for_backward(*saved.values(), *(before.get(k, piece) for k, piece in enumerate(pieces)), *owners)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k not in whole.tangents))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative()
        tensors, count = ctx.saved_tensors, len(ctx.kept)
        kept = dict(zip(ctx.kept, tensors, strict=False))
        pieces = list(tensors[count : count + len(ctx.step.interface.arguments)])
        del tensors
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
                _, kept = step.forward(pieces, keep_states=False)
            results = step.backward(pieces, kept, present)
            return (*none[:5], *(ctx.gradient(name, results[name]) if name in results else None for name in ctx.names))
