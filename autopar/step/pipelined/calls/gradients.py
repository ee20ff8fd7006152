"""Run a call on stages as one autograd function: from parameters and inputs to outputs, and back to their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.capture.model_state import ModelState
from autopar.ir.layout import Layout
from autopar.ir.record import TensorType
from autopar.ir.value_names import gradient_name
from autopar.model.dtensor_parameters import local_of
from autopar.model.inputs import CallInputs
from autopar.runtime.dtensors import full_tensor, is_dtensor
from autopar.runtime.running.programs import output_name
from autopar.runtime.running.rank import RankRun, Tensors
from autopar.runtime.simulation.pieces import cut, join
from autopar.step.pipelined.calls.gradient_sums import tangent_name
from autopar.step.pipelined.calls.staged_call import StagedCall
from autopar.step.run import StepRunner
from autopar.step.running import StepRuns
from autopar.torch_private import dtensor_like

TWICE = (
    "a captured step is differentiated once: its gradients cannot be differentiated again, so create_graph=True is "
    "refused; take such a penalty on the model itself, without autopar"
)


@dataclass(frozen=True)
class Differentiated:
    """A call whose gradients may be asked for.

    Attributes:
        call: its capture, with the tangents of the outputs that are expected to have gradients.
        special: returns the capture with the tangents of other outputs.
        runs_of: returns what a capture runs.
        runner: runs it on the ranks of this process.
        agree: is told from which outputs a backward runs; all ranks tell the same.
        inputs, state: those of the call.
        computed: the numbers and the seed of the call.
        before: the buffers that the forward writes, as they were.
    """

    call: StagedCall
    special: Callable[[frozenset[int]], StagedCall]
    runs_of: Callable[[StagedCall], StepRuns]
    runner: StepRunner
    agree: Callable[[Sequence[int]], None]
    inputs: CallInputs
    state: ModelState
    computed: Sequence[Tensors]
    before: Tensors

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """What may get a gradient, by name."""
        return {name: tensor for name, tensor in (*self.state.parameters, *self.inputs.named) if tensor.requires_grad}

    def begin(self, call: StagedCall, buffers: Tensors | None = None) -> tuple[dict[int, RankRun], list[torch.Tensor]]:
        """Run the forward. Returns the ranks, and the outputs. ``buffers``: in the place of the model's."""
        tensors = {**dict((*self.state.parameters, *self.state.buffers)), **(buffers or {})}
        return self.runner.begin([self.inputs], self.state, call, self.runs_of(call), tensors, self.computed)

    def gradients(self, call: StagedCall, made: Mapping[int, RankRun], tangents: Mapping[int, torch.Tensor]
                  ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Run the backward. Returns the gradients, by name; of ranks without a piece, an empty one."""
        given = {tangent_name(k): full_tensor(tangent) if is_dtensor(tangent) else tangent.contiguous()
                 for k, tangent in tangents.items()}  # fmt: skip
        for run in made.values():
            for stage in run.inputs:
                run.inputs[stage] = [{**run.inputs[stage][0], **given}]
        self.runner.complete(self.runs_of(call), made)
        leaves, found = self.leaves, dict[str, torch.Tensor]()
        for name in call.gradients.keys() & leaves.keys():
            home, layout = call.homes.stage[name], call.homes.layouts[name]
            boxes = {rank: run.boxes["sums", home] for rank, run in made.items() if rank in layout.mesh}
            pieces = {rank: box[gradient_name(name)] for rank, box in boxes.items()}
            found[name] = self._of_parameter(leaves[name], pieces, layout)
        count = len(call.returned)
        run = next(iter(made.values()))
        for k, name in enumerate(call.of_inputs):
            whole = run.outputs[None, 0][output_name(count + k)]
            found[name] = self._of_input(name, leaves[name], whole)
        return found

    def _of_parameter(self, leaf: torch.Tensor, pieces: Mapping[int, torch.Tensor], layout: Layout) -> torch.Tensor:
        if not is_dtensor(leaf):
            return join(pieces, TensorType(tuple(leaf.shape), leaf.dtype, layout), "a gradient")
        (piece,) = pieces.values() or (torch.zeros_like(local_of(leaf)),)
        return dtensor_like(piece, leaf)

    def _of_input(self, name: str, leaf: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return the piece that the leaf has of a whole gradient."""
        if name not in self.inputs.layouts:
            return whole
        mesh = self.runner.calls.mesh
        type = TensorType(tuple(whole.shape), whole.dtype, Layout(mesh, self.inputs.layouts[name]))
        piece = cut(whole, type, mesh.coordinates(self.runner.carrier.ranks[0])).contiguous()
        return dtensor_like(piece, leaf) if is_dtensor(leaf) else piece

    def __call__(self) -> list[torch.Tensor]:
        """Return the outputs, with an autograd graph."""
        return list(_StagedCall.apply(self, *self.leaves.values()))


class _StagedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: Differentiated, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.made, outputs = of.begin(of.call)
        kept = [(rank, key, name, value) for rank, run in ctx.made.items()
                for key, values in run.kept.items() for name, value in values.items()]  # fmt: skip
        for run in ctx.made.values():
            run.kept.clear()
            run.outputs.clear()
        ctx.of, ctx.kept = of, [row[:3] for row in kept]
        ctx.save_for_backward(*(row[3] for row in kept), *leaves)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k not in of.call.captured.differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(TWICE)
        of: Differentiated = ctx.of
        saved, call = ctx.saved_tensors[: len(ctx.kept)], of.call
        ctx.maybe_clear_saved_tensors()  # so that the backward frees what it has read, unless retain_graph=True
        present = {k: gradient for k, gradient in enumerate(gradients) if gradient is not None}
        if not present:
            return (None,) * (1 + len(of.leaves))
        of.agree(sorted(present))
        if present.keys() == call.positions:
            made = {rank: _again(run) for rank, run in ctx.made.items()}
            for (rank, key, name), value in zip(ctx.kept, saved, strict=True):
                made[rank].kept[key][name] = value
        else:
            call = of.special(frozenset(present))
            made, _ = of.begin(call, {name: buffer.clone() for name, buffer in of.before.items()})
        del saved
        found = of.gradients(call, made, present)
        return (None, *(found.get(name) for name in of.leaves))


def _again(run: RankRun) -> RankRun:
    """Return a rank as it stands behind the forward, so that another backward finds the same."""
    return replace(run, inputs=dict(run.inputs), boxes=defaultdict(dict, run.boxes), kept=defaultdict(dict),
                   outputs=defaultdict(dict))  # fmt: skip
