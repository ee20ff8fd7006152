"""A simulated step as one autograd function: full tensors in, full tensors out, full gradients back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.program import Program, operands, record_of
from autopar.record import TensorType
from autopar.runtime.pieces import cut, join
from autopar.runtime.simulate import Instruction, Values, compile_phases, run_ranks


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
        assert explicit.mesh is not None
        self.mesh: Mesh = explicit.mesh
        compiled = {id(program): compile_phases(program) for program in local.values()}
        self.code = {rank: compiled[id(program)] for rank, program in local.items()}
        types = {node.name: record_of(node).type for node in explicit.placeholders}
        self.types: dict[str, TensorType] = {name: t for name, t in types.items() if isinstance(t, TensorType)}
        roles = {node.name: record_of(node) for node in explicit.placeholders}
        self.tangents = {r.index: name for name, r in roles.items() if r.index is not None}
        self.given = [name for name, r in roles.items() if r.role != "tangent"]
        output = explicit.output
        rows = list(zip(operands(output), record_of(output).results, strict=True))
        self.returned = [(node.name, record_of(node).type) for node, result in rows if result.kind == "return"]
        self.states = {result.of: (node.name, record_of(node).type) for node, result in rows if result.kind == "state"}
        self.gradients = {result.of: (node.name, record_of(node).type) for node, result in rows if result.kind == "grad"}

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on full tensors: parameters, buffers, inputs, in the order of the placeholders. Buffers are updated."""
        if self.tangents:
            return list(_Step.apply(self, *tensors))  # type: ignore[no-untyped-call]
        return self.forward(tensors)[0]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, Values]]:
        """The returned tensors, and every value of every rank for the backward."""
        values = self.start(tensors)
        self.run("forward", values)
        given = dict(zip(self.given, tensors, strict=True))
        for of, (name, type) in self.states.items():
            with torch.no_grad():
                given[of].copy_(self.join(values, name, type))
        return [self.join(values, name, type) for name, type in self.returned], values

    def start(self, tensors: Sequence[torch.Tensor]) -> dict[int, Values]:
        given = dict(zip(self.given, tensors, strict=True))
        return {rank: self.cut(given, rank) for rank in self.mesh.ranks}

    def cut(self, given: Mapping[str, torch.Tensor], rank: int) -> Values:
        at = self.mesh.coordinates(rank)
        pieces = {name: cut(tensor.detach(), self.types[name], at) for name, tensor in given.items()}
        return {name: piece.clone() if name in self.states else piece for name, piece in pieces.items()}

    def run(self, phase: str, values: dict[int, Values]) -> None:
        code: dict[int, Sequence[Instruction]] = {rank: phases.get(phase, ()) for rank, phases in self.code.items()}
        with torch.no_grad(), contextlib.ExitStack() as off:
            for device in ("cpu", "cuda"):  # the program has the casts that autocast made while it was captured
                off.enter_context(torch.autocast(device, enabled=False))
            run_ranks(self.mesh, code, values)

    def join(self, values: Mapping[int, Values], name: str, type: Any) -> torch.Tensor:
        return join({rank: own[name] for rank, own in values.items()}, type, name)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: SimulatedStep, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, ctx.values = step.forward(tensors)
        ctx.step = step
        ctx.set_materialize_grads(False)
        # not used: torch then refuses a second backward without retain_graph, and tensors changed in between
        ctx.save_for_backward(*(t for name, t in zip(step.given, tensors, strict=True) if name not in step.states))
        ctx.mark_non_differentiable(*(o for k, o in enumerate(outputs) if k not in step.tangents))
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
        if given != step.tangents.keys():
            if not given:
                return (None,) * (1 + len(step.given))
            step = step.specialize(given)
            values = {rank: {name: own[name] for name in step.given} for rank, own in values.items()}
            step.run("forward", values)
        tangents = {name: gradients[k] for k, name in step.tangents.items()}
        values = {rank: {**own, **step.cut(tangents, rank)} for rank, own in values.items()}
        step.run("backward", values)
        found = {of: step.join(values, name, type) for of, (name, type) in step.gradients.items()}
        return (None, *(found.get(name) for name in step.given))
