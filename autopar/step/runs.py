"""Running a step: ``micro`` once for each micro-batch, then ``update``; on this rank of real processes, or on all in this process.

The sums of gradients and losses begin with the first micro-batch, go from each to the next, and end in the update, which writes
over them. Parameters and the optimizer's state are written in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from autopar.arguments import bind_arguments
from autopar.inputs import Given
from autopar.inventory import inventory
from autopar.localize import LocalPrograms
from autopar.program import Program
from autopar.runtime.pieces import cut, join
from autopar.runtime.whole import Pieces, ProcessRun, Results, SimulatedRun
from autopar.step.batches import Call
from autopar.step.compile import MicroBatch, StepUpdate
from autopar.step.copies import COPY
from autopar.step.micro import COUNT, LOSS, gradient_name

if TYPE_CHECKING:
    from autopar.parallel import Parallel


def sums_of(program: Results) -> frozenset[str]:
    """The placeholders of a program that are sums of gradients or of losses."""
    return frozenset(of for name, of in program.named.items() if name == LOSS or name.endswith(gradient_name("")))


@dataclass
class OnProcess:
    """Steps on this rank.

    Attributes:
        parallel: the model.
    """

    parallel: Parallel
    _runs: dict[int, ProcessRun] = field(default_factory=dict)

    def __call__(self, given: Sequence[Given], micro: MicroBatch, update: StepUpdate, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the update returns. ``state``: what it takes beside parameters and sums, by the user's names; written in place."""
        parallel = self.parallel
        own = inventory(parallel.module)
        run = self._run(micro.program, micro.local)
        pieces = [parallel.pieces(one, own, run.interface, self._rank)[0] for one in given]
        count = len(own.parameters) + len(own.buffers)
        model = dict(zip(run.interface.given[:count], pieces[0], strict=False))
        inputs = [dict(zip(run.interface.given[count:], some[count:], strict=False)) for some in pieces]
        counts = self._counts(micro, run, inputs, model)
        taken = _of_micro(run, state) | self._copies(micro, run, model)
        zeros = sums_of(run)
        sums: Pieces = {}
        for values in inputs:
            seed = _seed(run, parallel, micro)
            _, made = run({**model, **values, **counts, **sums, **seed, **taken}, frozenset() if sums else zeros)
            sums = {of: tensor for of, tensor in made.items() if of in zeros}
            for of, tensor in made.items():
                if of not in zeros:
                    model[of].copy_(tensor)
        del made, values, taken, inputs, pieces
        end = self._run(update.program, update.local, in_place=True)
        held = {name: model[of] for name, of in run.named.items() if of in model} | dict(state)
        names = {name: of for name, of in run.named.items() if of in zeros}
        returned, made = end({of: sums.pop(names[name]) if name in names else held[name] for name, of in end.named.items()})
        for name, of in end.named.items():
            if of in made and made[of] is not held[name]:
                held[name].copy_(made[of])
        return returned

    def _copies(self, micro: MicroBatch, to: ProcessRun, model: Pieces) -> Pieces:
        """What ``micro`` takes in the place of parameters."""
        if micro.copy is None:
            return {}
        run = self._run(*micro.copy)
        names = {name: model[of] for name, of in to.named.items() if of in model}
        _, made = run({of: names[name] for name, of in run.named.items() if name in names})
        return {to.named[name.removesuffix(COPY)]: made[of] for name, of in run.named.items() if of in made}

    def _counts(self, micro: MicroBatch, to: ProcessRun, inputs: list[Pieces], model: Pieces) -> Pieces:
        """What the micro-batches divide by, if they are told."""
        if micro.count is None:
            return {}
        run = self._run(*micro.count)
        given = model | {f"{of}_{k}": tensor for k, values in enumerate(inputs) for of, tensor in values.items()}
        returned, _ = run({of: given[of] for of in run.interface.given})
        return {to.named[f"{COUNT}.{k}"]: count for k, count in enumerate(returned)}

    @property
    def _rank(self) -> int:
        assert self.parallel.compiler.seat is not None
        return self.parallel.compiler.seat.rank

    def _run(self, program: Program, local: LocalPrograms, *, in_place: bool = False) -> ProcessRun:
        """``in_place``: the states are written to, and not only the sums."""
        if id(program) not in self._runs:
            seat, job = self.parallel.compiler.seat, self.parallel.job
            assert seat is not None
            gate = None if seat.agreement is None else seat.agreement.finish
            device = torch.device("cpu") if job is None else job.device
            found = Results(program)
            donated = sums_of(found) | (found.states.keys() if in_place else frozenset())
            self._runs[id(program)] = ProcessRun(program, local[seat.rank], seat.groups, gate, device, donated)
        return self._runs[id(program)]


@dataclass
class Simulated:
    """Steps of all ranks, in this process; on full tensors, which are cut, and joined again.

    Attributes:
        parallel: the model.
    """

    parallel: Parallel
    _runs: dict[int, SimulatedRun] = field(default_factory=dict)

    def __call__(self, calls: Sequence[Call], micro: MicroBatch, update: StepUpdate, state: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the update returns. ``state``: what it takes beside parameters and sums, by the user's names; written in place."""
        run, end = self._run(micro.program, micro.local), self._run(update.program, update.local)
        own, ranks = inventory(self.parallel.module), self.parallel.mesh.ranks
        full: dict[str, torch.Tensor] = {name: tensor.detach() for name, tensor in (*own.parameters, *own.buffers)}
        inputs = []
        for call in calls:
            arguments = bind_arguments(self.parallel.module, *call)
            inputs.append(dict(zip(arguments.names, arguments.tensors, strict=True)))
        counts = self._counts(micro, run, inputs, full)
        copies = self._copies(micro, run, full)
        held = {rank: {**_cut(run, {**full, **state}, rank), **_zeros(run, rank), **copies[rank]} for rank in ranks}
        for given in inputs:
            seed = _seed(run, self.parallel, micro)
            made = run({rank: {**held[rank], **_cut(run, given, rank), **counts[rank], **seed} for rank in ranks})
            for rank, (_, states) in made.items():
                held[rank] |= states
        _write(run, full, held)
        full |= state
        names = {name: of for name, of in run.named.items() if name not in full}
        made = end({rank: {**_cut(end, full, rank), **{of: held[rank][names[name]] for name, of in end.named.items() if name in names}} for rank in ranks})
        _write(end, full, {rank: states for rank, (_, states) in made.items()})
        returned = {rank: tensors for rank, (tensors, _) in made.items()}
        return [join({rank: own[k] for rank, own in returned.items()}, type, name) for k, (name, type) in enumerate(end.interface.returned)]

    def _copies(self, micro: MicroBatch, to: SimulatedRun, full: Mapping[str, torch.Tensor]) -> dict[int, Pieces]:
        """What ``micro`` takes in the place of parameters."""
        ranks = self.parallel.mesh.ranks
        if micro.copy is None:
            return {rank: {} for rank in ranks}
        run = self._run(*micro.copy)
        made = run({rank: _cut(run, full, rank) for rank in ranks})
        return {rank: {to.named[name.removesuffix(COPY)]: states[of] for name, of in run.named.items() if of in states} for rank, (_, states) in made.items()}

    def _counts(self, micro: MicroBatch, to: SimulatedRun, inputs: list[dict[str, torch.Tensor]], full: Mapping[str, torch.Tensor]) -> dict[int, Pieces]:
        """What the micro-batches divide by, if they are told."""
        ranks = self.parallel.mesh.ranks
        if micro.count is None:
            return {rank: {} for rank in ranks}
        run = self._run(*micro.count)
        given = {**full, **{f"{name}.{k}": tensor for k, tensors in enumerate(inputs) for name, tensor in tensors.items()}}
        made = run({rank: _cut(run, given, rank) for rank in ranks})
        return {rank: {to.named[f"{COUNT}.{k}"]: count for k, count in enumerate(returned)} for rank, (returned, _) in made.items()}

    def _run(self, program: Program, local: Any) -> SimulatedRun:
        if id(program) not in self._runs:
            self._runs[id(program)] = SimulatedRun(program, local)
        return self._runs[id(program)]


def _seed(run: Results, parallel: Parallel, micro: MicroBatch) -> Pieces:
    """The seed of a micro-batch, if it draws: each draws in its turn."""
    seed = parallel.seed(micro.captured)
    return {run.named["seed"]: seed[0]} if seed else {}


def _of_micro(run: Results, state: Mapping[str, torch.Tensor]) -> Pieces:
    """What ``micro`` takes of a step's state: the scale of the loss."""
    return {of: state[name] for name, of in run.named.items() if name in state}


def _cut(run: SimulatedRun, tensors: Mapping[str, torch.Tensor], rank: int) -> Pieces:
    """The pieces of those tensors that a program takes, on one rank."""
    at = run.interface.mesh.coordinates(rank)
    return {of: cut(tensors[name].detach(), run.interface.types[of], at).clone() for name, of in run.named.items() if name in tensors}


def _zeros(run: SimulatedRun, rank: int) -> Pieces:
    """What sums begin with, on one rank."""
    mesh = run.interface.mesh
    types = {of: run.interface.types[of] for of in sums_of(run)}
    return {of: torch.zeros(type.attr.local_shape(type.shape, mesh, mesh.coordinates(rank)), dtype=type.dtype) for of, type in types.items()}


def _write(run: SimulatedRun, full: Mapping[str, torch.Tensor], held: Mapping[int, Pieces]) -> None:
    """The next values of states, joined, into the full tensors."""
    for name, of in run.named.items():
        if of in run.states and name in full:
            full[name].copy_(join({rank: own[of] for rank, own in held.items()}, run.interface.types[of], of))
