"""Run a step: ``micro`` once for each micro-batch, then ``update``; on this rank of real processes, or on all ranks in this process.

The sums of gradients and losses begin with the first micro-batch, go from each to the next, and end in the update, which writes
over them. Parameters and the optimizer's state are written in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.model_state import Inventory
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.value_names import SCALE, batch_input_name, copy_name, count_name
from autopar.model.calls import Calls
from autopar.model.inputs import CallInputs
from autopar.runtime import anomaly
from autopar.runtime.anomaly import nth
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.lower import Lowered
from autopar.runtime.simulation.pieces import cut, join
from autopar.runtime.whole import Pieces, ProcessRun, Results, SimulatedRun
from autopar.step.compile import MicroBatch, StepUpdate
from autopar.step.outputs import join_pieces, join_whole

Returned = tuple[list[torch.Tensor], list[torch.Tensor]]  # of the update, and of all micro-batches
COUNTS, COPIES = "the counts of all micro-batches", "the low-precision copies of parameters"  # what runs beside micro-batches and update


def lowered_of(last: Program, local: LocalPrograms, rank: int, written: Collection[str], microbatches: int, offload: bool = False) -> Lowered:
    """The function that a rank runs for the last micro-batch and the update, to look at."""
    run = ProcessRun(last, local[rank], _Groups(), None, torch.device("cpu"), _donated(Results(last), written), offloaded=offload)
    return run.lowered(frozenset(run.named[name] for name in run.sums) if microbatches == 1 else frozenset())


class _Groups(dict[Any, str]):
    """A process group of any ranks, in name."""

    def __missing__(self, ranks: Any) -> str:
        return "group"


def _donated(found: Results, written: Collection[str]) -> list[str]:
    """The placeholders of a program that it may write to: sums, and states that it is told of by the user's names."""
    return [of for name, of in found.named.items() if name in written or name in found.sums]


@dataclass
class OnProcess:
    """Steps on this rank.

    Attributes:
        calls: of the model.
        offload: whether the optimizer's state is in host memory.
    """

    calls: Calls
    offload: bool = False
    _runs: dict[int, ProcessRun] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: Inventory, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor]) -> Returned:  # fmt: skip
        """Run the step of a batch: what the update returns, and the model's outputs.

        Args:
            batch: the inputs of each micro-batch.
            model: its parameters and buffers, which are written in place.
            state: what the update takes beside parameters and sums, by the user's names; written in place.
        """
        calls, rank = self.calls, self.calls.context().rank
        run, end = self._run(micro.program, micro.local), self._run(*update.last, update.states)
        pieces = [calls.tensors.pieces(inputs, model, run.interface, rank).tensors for inputs in batch]
        names = [run.names[of] for of in run.interface.given]
        count = len(model.parameters) + len(model.buffers)
        held: Pieces = {**dict(zip(names[:count], pieces[0], strict=False)), **state}
        inputs = [dict(zip(names[count:], some[count:], strict=False)) for some in pieces]
        if anomaly.is_on():
            anomaly.refuse_nan(model, dict(zip(names[:count], pieces[0], strict=False)), inputs, state, rank)
        del pieces
        copies = self._copies(micro, held)
        taken = {**held, **copies}
        low = {name: copies[copy_name(name)] for name in held if copy_name(name) in copies}
        *others, last = inputs
        total, sums, made_out, outputs = len(inputs), Pieces(), len(run.returned), list[list[torch.Tensor]]()
        counted = {batch_input_name(name, k): tensor for k, values in enumerate(inputs) for name, tensor in values.items()} if micro.first else {}
        del inputs, copies
        for k, values in enumerate(others, 1):
            beginning = self._run(*micro.first) if micro.first and k == 1 else run
            given_back, made = self._called(beginning, {**taken, **low, **values, **calls.computed(micro.captured), **sums, **counted}, counted, during=nth(k, total))
            first = len(given_back) - made_out
            outputs.append(given_back[first:])
            taken |= {count_name(j): count for j, count in enumerate(given_back[:first])}
            sums = {name: made.pop(name) for name in run.sums}
            for name, tensor in made.items():
                held[name].copy_(tensor)
            del made
        low.clear()
        returned, made = self._called(end, {**taken, **last, **calls.computed(micro.captured), **sums}, taken, sums, during=nth(total, total))
        for name, tensor in made.items():
            if tensor is not held[name]:
                held[name].copy_(tensor)
        outputs.append(returned[:made_out])
        types = [type for _, type in run.interface.returned]
        brought = _brought(batch[0], calls.mesh)
        joined = [join_pieces(output, parts, type, calls.tensors, brought) for output, type, *parts in zip(micro.outputs, types, *outputs, strict=True)]
        return returned[made_out:], joined

    def _called(self, run: ProcessRun, values: Pieces, *emptied: Pieces, during: str) -> tuple[list[torch.Tensor], Pieces]:
        """Run a program on pieces, by the user's names: what it returns, and the next values of its states. Sums that are not among the
        pieces are zero. ``emptied``: where else pieces are held that are not needed any more."""
        zeros = frozenset(run.named[name] for name in run.sums if name not in values)
        given = {of: values[name] for name, of in run.named.items() if name in values}
        for some in (values, *emptied):
            some.clear()
        returned, made = run(given, zeros, during)
        return returned, {run.names[of]: tensor for of, tensor in made.items()}

    def _copies(self, micro: MicroBatch, held: Pieces) -> Pieces:
        """Those of parameters in low precision."""
        if micro.copy is None:
            return {}
        _, made = self._called(self._run(*micro.copy), dict(held), during=COPIES)
        return made

    def _run(self, program: Program, local: LocalPrograms, written: Collection[str] = ()) -> ProcessRun:
        """``written``: the states, by the user's names, that are written to, and not only the sums."""
        if id(program) not in self._runs:
            context, job = self.calls.context(), self.calls.job
            gate = None if context.agreement is None else context.agreement.finish
            device = torch.device("cpu") if job is None else job.device
            found = Results(program)
            scaled = SCALE in found.named
            self._runs[id(program)] = ProcessRun(program, local[context.rank], context.groups, gate, device, _donated(found, written), scaled, self.offload)
        return self._runs[id(program)]

    def forget(self, program: Program) -> None:
        """The program is not run again."""
        self._runs.pop(id(program), None)

    def clear(self) -> None:
        """No program is run again."""
        self._runs.clear()


@dataclass
class Simulated:
    """Steps of all ranks, in this process; on full tensors, which are cut, and joined again.

    Attributes:
        calls: of the model.
    """

    calls: Calls
    _runs: dict[int, SimulatedRun] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: Inventory, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor]) -> Returned:  # fmt: skip
        """The same as ``OnProcess`` does, of all ranks."""
        run, end = self._run(micro.program, micro.local), self._run(update.program, update.local)
        ranks = self.calls.mesh.ranks
        full: dict[str, torch.Tensor] = {name: tensor.detach() for name, tensor in (*model.parameters, *model.buffers)}
        names = [run.names[of] for of in run.interface.given[len(full) :]]
        inputs = [dict(zip(names, some.arguments.tensors, strict=False)) for some in batch]
        if anomaly.is_on():
            anomaly.refuse_nan(model, full, inputs, state)
        counts = self._counts(micro, run, inputs, full)
        copies = self._copies(micro, run, full)
        held = {rank: {**_cut(run, {**full, **state}, rank), **_zeros(run, rank), **copies[rank]} for rank in ranks}
        outputs: list[list[torch.Tensor]] = []
        for k, values in enumerate(inputs, 1):
            computed = {run.named[name]: one for name, one in self.calls.computed(micro.captured).items() if name in run.named}
            made = run({rank: {**held[rank], **_cut(run, values, rank), **counts[rank], **computed} for rank in ranks}, nth(k, len(inputs)))
            for rank, (_, states) in made.items():
                held[rank] |= states
            outputs.append(_joined(run, made))
        _write(run, full, held)
        full |= state
        names = {name: of for name, of in run.named.items() if name not in full}
        made = end({rank: {**_cut(end, full, rank), **{of: held[rank][names[name]] for name, of in end.named.items() if name in names}} for rank in ranks})
        _write(end, full, {rank: states for rank, (_, states) in made.items()})
        return _joined(end, made), [join_whole(one, parts) for one, *parts in zip(micro.outputs, *outputs, strict=True)]

    def _copies(self, micro: MicroBatch, to: SimulatedRun, full: Mapping[str, torch.Tensor]) -> dict[int, Pieces]:
        """What ``micro`` takes in the place of parameters."""
        ranks = self.calls.mesh.ranks
        if micro.copy is None:
            return {rank: {} for rank in ranks}
        run = self._run(*micro.copy)
        made = run({rank: _cut(run, full, rank) for rank in ranks}, COPIES)
        return {rank: {to.named[name]: states[run.named[copy_name(name)]] for name in run.named if copy_name(name) in run.named} for rank, (_, states) in made.items()}

    def _counts(self, micro: MicroBatch, to: SimulatedRun, inputs: list[dict[str, torch.Tensor]], full: Mapping[str, torch.Tensor]) -> dict[int, Pieces]:
        """What the micro-batches divide by, if they are told."""
        ranks = self.calls.mesh.ranks
        if micro.count is None:
            return {rank: {} for rank in ranks}
        run = self._run(*micro.count)
        given = {**full, **{batch_input_name(name, k): tensor for k, tensors in enumerate(inputs) for name, tensor in tensors.items()}}
        made = run({rank: _cut(run, given, rank) for rank in ranks}, COUNTS)
        return {rank: {to.named[count_name(k)]: count for k, count in enumerate(returned)} for rank, (returned, _) in made.items()}

    def _run(self, program: Program, local: Any) -> SimulatedRun:
        if id(program) not in self._runs:
            self._runs[id(program)] = SimulatedRun(program, local, SCALE in Results(program).named)
        return self._runs[id(program)]

    def forget(self, program: Program) -> None:
        """The program is not run again."""
        self._runs.pop(id(program), None)


def _brought(inputs: CallInputs, mesh: Mesh) -> int:
    """How many pieces of the batch the ranks bring; 0 where all have the same batch."""
    counts = [mesh.count(inputs.layouts[name].dims[0][0][1]) for name in inputs.shapes if inputs.layouts[name].dims]
    return max(counts, default=0)


def _joined(run: SimulatedRun, made: Mapping[int, tuple[list[torch.Tensor], Pieces]]) -> list[torch.Tensor]:
    """What a program returned, of all ranks."""
    return [join({rank: tensors[k] for rank, (tensors, _) in made.items()}, type, name) for k, (name, type) in enumerate(run.interface.returned)]


def _cut(run: SimulatedRun, tensors: Mapping[str, torch.Tensor], rank: int) -> Pieces:
    """The pieces of those tensors that a program takes, on one rank."""
    at = run.interface.mesh.coordinates(rank)
    return {of: cut(tensors[name].detach(), run.interface.types[of], at).clone() for name, of in run.named.items() if name in tensors}


def _zeros(run: SimulatedRun, rank: int) -> Pieces:
    """What sums begin with, on one rank."""
    mesh = run.interface.mesh
    types = {of: run.interface.types[of] for of in map(run.named.__getitem__, run.sums)}
    return {of: torch.zeros(type.attr.local_shape(type.shape, mesh, mesh.coordinates(rank)), dtype=type.dtype) for of, type in types.items()}


def _write(run: SimulatedRun, full: Mapping[str, torch.Tensor], held: Mapping[int, Pieces]) -> None:
    """The next values of states, joined, into the full tensors."""
    for name, of in run.named.items():
        if of in run.states and name in full:
            full[name].copy_(join({rank: own[of] for rank, own in held.items()}, run.interface.types[of], of))
