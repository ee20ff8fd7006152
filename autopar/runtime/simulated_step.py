"""Run a simulated step as one autograd function, from full tensors to full tensors, with full gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from autopar.ir.program import Program
from autopar.ir.record import PHASES, TensorType
from autopar.runtime import anomaly
from autopar.runtime.interface import Interface
from autopar.runtime.modes import as_captured
from autopar.runtime.redistribute import Redistribution, reduced
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.simulation.simulate import Instruction, Values, compile_phases, run_ranks


class SimulatedStep:
    """The local programs of all ranks, ready to run.

    Args:
        explicit: the program with Layouts, by which tensors are cut and joined.
        local: rank → its local program; ranks of one class share one.
        specialize: returns the step whose backward has tangents for only some of the returned values. (A missing
            gradient is not a gradient of zero: a value that depends only on it has no gradient.)
    """

    def __init__(
        self, explicit: Program, local: Mapping[int, Program], specialize: Callable[[frozenset[int]], SimulatedStep]
    ) -> None:
        self.specialize = specialize
        self.interface = Interface.of(explicit)
        self.mesh, self.meshes = self.interface.mesh, explicit.meshes
        self._local = local

    @cached_property
    def code(self) -> dict[int, dict[str, list[Instruction]]]:
        """Rank → its instructions, by phase; ranks of one class share them.

        Compiled on first use, because a program may only be printed.
        """
        compiled: dict[int, dict[str, list[Instruction]]] = {}
        by_rank = {}
        for rank, program in self._local.items():
            key = id(program.graph)
            if key not in compiled:
                compiled[key] = compile_phases(program)
            by_rank[rank] = compiled[key]
        return by_rank

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on full tensors: parameters, buffers, inputs, in the order of the placeholders. Buffers are updated."""
        if self.interface.tangents:
            return list(_Step.apply(self, *tensors))
        return self.forward(tensors)[0]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, Values]]:
        """Return the returned tensors, and every value of every rank for the backward."""
        values = self.start(tensors)
        for phase in ("forward",) if self.interface.tangents else PHASES:
            self.run(phase, values)
        tensors_by_name = dict(zip(self.interface.arguments, tensors, strict=True))
        for state, (name, type) in self.interface.states.items():
            with torch.no_grad():
                tensors_by_name[state].copy_(self.join(values, name, type))
        return [self.join(values, name, type) for name, type in self.interface.returned], values

    def start(self, tensors: Sequence[torch.Tensor]) -> dict[int, Values]:
        tensors_by_name = dict(zip(self.interface.arguments, tensors, strict=True))
        values = {rank: self.cut(tensors_by_name, rank) for rank in self.mesh.ranks}
        for name in self.interface.arguments:
            if (type := self.interface.types[name]).attr.pending:
                mesh = type.mesh
                whole = {rank: values[rank][name] for rank in mesh.ranks}
                for rank, addend in Redistribution(reduced(type), type).simulate(whole).items():
                    values[rank][name] = addend
        return values

    def cut(self, tensors: Mapping[str, torch.Tensor | None], rank: int) -> Values:
        """Return the rank's pieces of full tensors; only a subclass knows what ``None`` stands for."""
        pieces = {}
        for name, tensor in tensors.items():
            assert tensor is not None, name
            type = self.interface.types[name]
            mesh = type.mesh
            if rank in mesh:  # else it is on a stage without this rank
                piece = cut(tensor.detach(), type, mesh.coordinates(rank))
                pieces[name] = piece.clone() if name in self.interface.states else piece
        return pieces

    def run(self, phase: str, values: dict[int, Values]) -> None:
        if anomaly.is_on():
            values |= {
                rank: anomaly.Watched(rank_values, anomaly.Hunt(self._local[rank]))
                for rank, rank_values in values.items()
            }
        code: dict[int, Sequence[Instruction]] = {rank: phases.get(phase, ()) for rank, phases in self.code.items()}
        with as_captured():
            run_ranks(self.meshes, code, values)

    def join(self, values: Mapping[int, Values], name: str, type: TensorType) -> torch.Tensor:
        pieces = {rank: values[rank][name] for rank in type.mesh.ranks}
        if type.attr.pending:
            pieces = Redistribution(type, reduced(type)).simulate(pieces)
            type = reduced(type)
        return join(pieces, type, name)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: SimulatedStep, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, ctx.values = step.forward(tensors)
        ctx.step = step
        ctx.set_materialize_grads(False)
        # saved but not read, so that torch refuses a second backward without retain_graph, and tensors that have
        # changed since
        ctx.save_for_backward(
            *(t for name, t in zip(step.interface.arguments, tensors, strict=True) if name not in step.interface.states)
        )
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k not in step.interface.tangents))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a captured step is differentiated once: its gradients cannot be differentiated again, "
                "so create_graph=True is refused; take such a penalty on the model itself, without autopar"
            )
        step: SimulatedStep = ctx.step
        positions = frozenset(k for k, gradient in enumerate(gradients) if gradient is not None)
        values: dict[int, Values] = ctx.values
        if positions != step.interface.tangents.keys():
            if not positions:
                return (None,) * (1 + len(step.interface.arguments))
            step = step.specialize(positions)
            values = {
                rank: {name: rank_values[name] for name in step.interface.arguments}
                for rank, rank_values in values.items()
            }
            step.run("forward", values)
        tangents = {name: gradients[k] for k, name in step.interface.tangents.items()}
        values = {rank: {**rank_values, **step.cut(tangents, rank)} for rank, rank_values in values.items()}
        step.run("backward", values)
        results = {
            placeholder: step.join(values, name, type) for placeholder, (name, type) in step.interface.gradients.items()
        }
        return (None, *(results.get(name) for name in step.interface.arguments))
