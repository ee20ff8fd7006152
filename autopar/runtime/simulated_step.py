"""A simulated step as one autograd function: full tensors in, full tensors out, full gradients back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from autopar.ir.program import Program
from autopar.runtime import anomaly
from autopar.runtime.interface import Interface
from autopar.runtime.modes import as_captured
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.simulation.simulate import Instruction, Values, compile_phases, run_ranks


class SimulatedStep:
    """The local programs of all ranks, ready to run.

    Args:
        explicit: the program with Layouts, which say how tensors are cut and joined.
        local: rank → its local program; ranks of one class share one.
        specialize: gives the step whose backward has tangents for only some of the returned values. (A gradient that
            is not given is not a gradient of zero: what depends on it alone has none.)
    """

    def __init__(
        self,
        explicit: Program,
        local: Mapping[int, Program],
        specialize: Callable[[frozenset[int]], SimulatedStep],
    ) -> None:
        self.specialize = specialize
        self.interface = Interface.of(explicit)
        self.mesh, self.meshes = self.interface.mesh, explicit.meshes
        self._local = local

    @cached_property
    def code(self) -> dict[int, dict[str, list[Instruction]]]:
        """Rank → its instructions, by phase; ranks of one class share them. Not made for a program that is only looked at."""
        compiled: dict[int, dict[str, list[Instruction]]] = {}
        found = {}
        for rank, program in self._local.items():
            key = id(program.graph)
            if key not in compiled:
                compiled[key] = compile_phases(program)
            found[rank] = compiled[key]
        return found

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on full tensors: parameters, buffers, inputs, in the order of the placeholders. Buffers are updated."""
        if self.interface.tangents:
            return list(_Step.apply(self, *tensors))  # type: ignore[no-untyped-call]
        return self.forward(tensors)[0]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, Values]]:
        """The returned tensors, and every value of every rank for the backward."""
        values = self.start(tensors)
        self.run("forward", values)
        given = dict(zip(self.interface.given, tensors, strict=True))
        for of, (name, type) in self.interface.states.items():
            with torch.no_grad():
                given[of].copy_(self.join(values, name, type))
        return [self.join(values, name, type) for name, type in self.interface.returned], values

    def start(self, tensors: Sequence[torch.Tensor]) -> dict[int, Values]:
        given = dict(zip(self.interface.given, tensors, strict=True))
        return {rank: self.cut(given, rank) for rank in self.mesh.ranks}

    def cut(self, given: Mapping[str, torch.Tensor], rank: int) -> Values:
        at = self.mesh.coordinates(rank)
        pieces = {name: cut(tensor.detach(), self.interface.types[name], at) for name, tensor in given.items()}
        return {name: piece.clone() if name in self.interface.states else piece for name, piece in pieces.items()}

    def run(self, phase: str, values: dict[int, Values]) -> None:
        if anomaly.is_on():
            values |= {rank: anomaly.Watched(own, anomaly.Hunt(self._local[rank])) for rank, own in values.items()}
        code: dict[int, Sequence[Instruction]] = {rank: phases.get(phase, ()) for rank, phases in self.code.items()}
        with as_captured():
            run_ranks(self.meshes, code, values)

    def join(self, values: Mapping[int, Values], name: str, type: Any) -> torch.Tensor:
        return join({rank: own[name] for rank, own in values.items()}, type, name)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: SimulatedStep, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, ctx.values = step.forward(tensors)
        ctx.step = step
        ctx.set_materialize_grads(False)
        # not used: torch then refuses a second backward without retain_graph, and tensors changed in between
        ctx.save_for_backward(*(t for name, t in zip(step.interface.given, tensors, strict=True) if name not in step.interface.states))
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
        given = frozenset(k for k, gradient in enumerate(gradients) if gradient is not None)
        values: dict[int, Values] = ctx.values
        if given != step.interface.tangents.keys():
            if not given:
                return (None,) * (1 + len(step.interface.given))
            step = step.specialize(given)
            values = {rank: {name: own[name] for name in step.interface.given} for rank, own in values.items()}
            step.run("forward", values)
        tangents = {name: gradients[k] for k, name in step.interface.tangents.items()}
        values = {rank: {**own, **step.cut(tangents, rank)} for rank, own in values.items()}
        step.run("backward", values)
        found = {of: step.join(values, name, type) for of, (name, type) in step.interface.gradients.items()}
        return (None, *(found.get(name) for name in step.interface.given))
