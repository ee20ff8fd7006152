"""Run a simulated step as one autograd function, from full tensors to full tensors, with full gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch

from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.runtime.interface import Interface
from autopar.runtime.process_step import BACKWARD, KEPT, refuse_second_derivative
from autopar.runtime.redistribute import Redistribution, reduced
from autopar.runtime.running.carriers import SimulatedCarrier
from autopar.runtime.running.functions import PlacedProgram
from autopar.runtime.running.programs import CallProgram, output_name
from autopar.runtime.running.rank import Lines, RankRun, Tensors
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.simulation.simulate import Values
from autopar.timetable import Entry


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
        self.mesh = self.interface.mesh
        self._explicit, self._local = explicit, local

        self._carrier = SimulatedCarrier(self.mesh.ranks, torch.device("cpu"))

    @cached_property
    def programs(self) -> dict[int, CallProgram]:
        """Rank → its program. Compiled on first use, because a program may only be printed."""
        placed = PlacedProgram(self._explicit, self._local)
        return {rank: CallProgram(self._carrier.functions(placed, rank)) for rank in self.mesh.ranks}

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on full tensors: parameters, buffers, inputs, in the order of the placeholders. Buffers are updated."""
        if self.interface.tangents:
            return list(_SimulatedCall.apply(self, *tensors))
        return self.forward(tensors)[0]

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], dict[int, RankRun]]:
        """Return the returned tensors, and each rank with what the backward takes."""
        runs = self.begin(self.start(tensors))
        tensors_by_name = dict(zip(self.interface.arguments, tensors, strict=True))
        for state, (_, type) in self.interface.states.items():
            with torch.no_grad():
                tensors_by_name[state].copy_(self.join({rank: run.written for rank, run in runs.items()}, state, type))
        outputs = {rank: run.outputs[None, None] for rank, run in runs.items()}
        returned = self.interface.returned
        return [self.join(outputs, output_name(k), type, name) for k, (name, type) in enumerate(returned)], runs

    def begin(self, pieces: Mapping[int, Values]) -> dict[int, RankRun]:
        """Run the forward on the pieces of all ranks; all phases, where there is no tangent."""
        runs = {rank: self._run(rank, own) for rank, own in pieces.items()}
        part = Entry("call", "forward" if self.interface.tangents else "whole")
        self._carrier.run({rank: run.call(part, "") for rank, run in runs.items()})
        return runs

    def backward(self, runs: Mapping[int, RankRun], tangents: Mapping[str, torch.Tensor | None]
                 ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return the gradients, by placeholder. ``tangents``: by placeholder; ``None`` stands for zeros."""
        again = {}
        for rank, run in runs.items():
            again[rank] = own = self._run(rank, {**run.held, **self.cut(tangents, rank)})
            own.kept[KEPT] = dict(run.kept[KEPT])
        made: dict[int, Values] = {}

        def kept(rank: int, run: RankRun) -> Lines:
            made[rank] = yield from run.run_part(self.programs[rank], BACKWARD, "", zeros=False)

        self._carrier.run({rank: kept(rank, run) for rank, run in again.items()})
        for rank, run in again.items():  # a gradient may be computed in the forward, or be what was given
            made[rank] = {**run.held, **runs[rank].kept[KEPT], **made[rank]}
        return {of: self.join(made, name, type) for of, (name, type) in self.interface.gradients.items()}

    def _run(self, rank: int, held: Tensors) -> RankRun:
        nowhere = ("", nullcontext())
        return RankRun({("call", None): self.programs[rank]}, held, {}, torch.device("cpu"), lambda entry: nowhere)

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
        """Return the rank's pieces of full tensors; ``None`` stands for zeros."""
        pieces = {}
        for name, tensor in tensors.items():
            type = self.interface.types[name]
            if rank not in type.mesh:  # it is on a stage without this rank
                continue
            if tensor is None:
                device = next((given.device for given in tensors.values() if given is not None), None)
                tensor = torch.zeros(type.shape, dtype=type.dtype, device=device)
            piece = cut(tensor.detach(), type, type.mesh.coordinates(rank))
            pieces[name] = piece.clone() if name in self.interface.states else piece
        return pieces

    def join(self, values: Mapping[int, Values], name: str, type: TensorType, words: str = "") -> torch.Tensor:
        """Return the full tensor of a value of all ranks. ``words``: what errors call it, if not by its name."""
        pieces = {rank: values[rank][name] for rank in type.mesh.ranks}
        if type.attr.pending:
            pieces = Redistribution(type, reduced(type)).simulate(pieces)
            type = reduced(type)
        return join(pieces, type, words or name)


class _SimulatedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: SimulatedStep, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, ctx.runs = step.forward(tensors)
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
        refuse_second_derivative()
        step: SimulatedStep = ctx.step
        positions = frozenset(k for k, gradient in enumerate(gradients) if gradient is not None)
        runs: dict[int, RankRun] = ctx.runs
        if positions != step.interface.tangents.keys():
            if not positions:
                return (None,) * (1 + len(step.interface.arguments))
            step = step.specialize(positions)
            runs = step.begin({rank: run.held for rank, run in runs.items()})
        results = step.backward(runs, {name: gradients[k] for k, name in step.interface.tangents.items()})
        return (None, *(results.get(name) for name in step.interface.arguments))
