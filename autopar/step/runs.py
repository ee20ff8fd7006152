"""Run a step: ``micro`` once for each micro-batch, then ``update``.

A step runs on this rank of real processes, or for all ranks in this process. The sums of gradients and losses begin as
zeros at the first micro-batch and go from each micro-batch to the next. The update may write over them. Parameters and
the optimizer's state are updated in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture.model_state import ModelState
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
from autopar.scheduling.programs.order import donated_names
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate
from autopar.step.compiling.outputs import join_pieces, join_whole

# the values that the update returns, and the outputs of all micro-batches
Returned = tuple[list[torch.Tensor], list[torch.Tensor]]
# names, in errors, of what runs beside the micro-batches and the update
COUNTS, COPIES = ("the counts of all micro-batches", "the low-precision copies of parameters")


def lowered_of(
    last: Program, local: LocalPrograms, rank: int, written: Collection[str], microbatches: int, offload: bool = False
) -> Lowered:
    """Return the function that a rank runs for the last micro-batch and the update, for inspection.

    It has no process groups.
    """
    run = ProcessRun(
        last, local[rank], _Groups(), None, torch.device("cpu"), donated_names(last, written), offloaded=offload
    )
    return run.lowered(frozenset(run.named[name] for name in run.sums) if microbatches == 1 else frozenset())


class _Groups(dict[Any, str]):
    """Gives each set of ranks the name of a group that does not exist."""

    def __missing__(self, ranks: Any) -> str:
        return "group"


@dataclass
class OnProcess:
    """Runs steps on this rank.

    Attributes:
        calls: the calls of the model.
        offload: whether the optimizer's state is in host memory.
    """

    calls: Calls
    offload: bool = False
    _runs: dict[int, ProcessRun] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor]) -> Returned:  # fmt: skip
        """Run the step of a batch. Returns the values of the update, and the model's outputs.

        Args:
            batch: the inputs of each micro-batch.
            model: the model's parameters and buffers, which are updated in place.
            state: the other inputs and states of the update, by the user's names; states are updated in place.
        """
        calls, rank = self.calls, self.calls.context().rank
        run, end = self.run_of(micro.program, micro.local), self.run_of(*update.last, update.states)
        pieces = [calls.tensors.pieces(inputs, model, run.interface, rank).tensors for inputs in batch]
        names = [run.names[of] for of in run.interface.arguments]
        count = len(model.parameters) + len(model.buffers)
        pieces_by_name: Pieces = {**dict(zip(names[:count], pieces[0], strict=False)), **state}
        inputs = [dict(zip(names[count:], tensors[count:], strict=False)) for tensors in pieces]
        if anomaly.is_on():
            anomaly.refuse_nan(model, dict(zip(names[:count], pieces[0], strict=False)), inputs, state, rank)
        del pieces
        copies = self.copies(micro, pieces_by_name)
        with_copies = {**pieces_by_name, **copies}
        low_copies = {name: copies[copy_name(name)] for name in pieces_by_name if copy_name(name) in copies}
        *others, last = inputs
        total, sums, output_count, outputs = len(inputs), Pieces(), len(run.returned), list[list[torch.Tensor]]()
        counted = (
            {batch_input_name(name, k): tensor for k, values in enumerate(inputs) for name, tensor in values.items()}
            if micro.first
            else {}
        )
        del inputs, copies
        for k, values in enumerate(others, 1):
            beginning = self.run_of(*micro.first) if micro.first and k == 1 else run
            returned, states = self.called(
                beginning,
                {**with_copies, **low_copies, **values, **calls.computed(micro.captured), **sums, **counted},
                counted,
                during=nth(k, total),
            )
            outputs_begin = len(returned) - output_count
            outputs.append(returned[outputs_begin:])
            with_copies |= {count_name(j): count for j, count in enumerate(returned[:outputs_begin])}
            sums = {name: states.pop(name) for name in run.sums}
            for name, tensor in states.items():
                pieces_by_name[name].copy_(tensor)
            del states
        low_copies.clear()
        returned, states = self.called(
            end,
            {**with_copies, **last, **calls.computed(micro.captured), **sums},
            with_copies,
            sums,
            during=nth(total, total),
        )
        for name, tensor in states.items():
            if tensor is not pieces_by_name[name]:
                pieces_by_name[name].copy_(tensor)
        outputs.append(returned[:output_count])
        types = [type for _, type in run.interface.returned]
        brought = brought_pieces(batch[0], calls.mesh)
        joined = [
            join_pieces(output, parts, type, calls.tensors, brought)
            for output, type, *parts in zip(micro.outputs, types, *outputs, strict=True)
        ]
        return returned[output_count:], joined

    def called(
        self, run: ProcessRun, values: Pieces, *emptied: Pieces, during: str
    ) -> tuple[list[torch.Tensor], Pieces]:
        """Run a program on pieces, by the user's names.

        Returns its values, and the next values of its states. Sums without a piece begin as zeros. ``values`` is
        emptied, and so are the dicts in ``emptied``, so that no piece takes memory longer than needed.
        """
        zeros = frozenset(run.named[name] for name in run.sums if name not in values)
        operands = {of: values[name] for name, of in run.named.items() if name in values}
        for pieces in (values, *emptied):
            pieces.clear()
        returned, states = run(operands, zeros, during)
        return returned, {run.names[of]: tensor for of, tensor in states.items()}

    def copies(self, micro: MicroBatch, held: Pieces) -> Pieces:
        """Make the low-precision copies of parameters, by their names: ``w.copy``."""
        if micro.copy is None:
            return {}
        _, copies = self.called(self.run_of(*micro.copy), dict(held), during=COPIES)
        return copies

    def run_of(self, program: Program, local: LocalPrograms, written: Collection[str] = ()) -> ProcessRun:
        """Return the program of this rank as a function.

        ``written``: the states that it may write to besides the sums, by the user's names.
        """
        if id(program) not in self._runs:
            context, job = self.calls.context(), self.calls.job
            gate = None if context.agreement is None else context.agreement.finish
            device = torch.device("cpu") if job is None else job.device
            results = Results(program)
            scaled = SCALE in results.named
            self._runs[id(program)] = ProcessRun(
                program,
                local[context.rank],
                context.groups_for(local),
                gate,
                device,
                donated_names(program, written),
                scaled,
                self.offload,
                regions=context.regions,
            )
        return self._runs[id(program)]

    def forget(self, program: Program) -> None:
        """Drop a program that does not run again."""
        self._runs.pop(id(program), None)

    def clear(self) -> None:
        """Drop all programs."""
        self._runs.clear()


@dataclass
class Simulated:
    """Runs steps of all ranks in this process, on full tensors.

    The tensors are cut into pieces, and the results are joined again.

    Attributes:
        calls: the calls of the model.
    """

    calls: Calls
    _runs: dict[int, SimulatedRun] = field(default_factory=dict)

    def __call__(self, batch: Sequence[CallInputs], model: ModelState, micro: MicroBatch, update: StepUpdate,
                 state: Mapping[str, torch.Tensor]) -> Returned:  # fmt: skip
        """Run the step of a batch on all ranks. Arguments and results are as those of ``OnProcess``."""
        run, end = self.run_of(micro.program, micro.local), self.run_of(update.program, update.local)
        ranks = self.calls.mesh.ranks
        full: dict[str, torch.Tensor] = {name: tensor.detach() for name, tensor in (*model.parameters, *model.buffers)}
        names = [run.names[of] for of in run.interface.arguments[len(full) :]]
        inputs = [dict(zip(names, call.arguments.tensors, strict=False)) for call in batch]
        if anomaly.is_on():
            anomaly.refuse_nan(model, full, inputs, state)
        counts = self.counts(micro, run, inputs, full)
        copies = self.copies(micro, run, full)
        pieces_of = {
            rank: {**cut_pieces(run, {**full, **state}, rank), **zero_sums(run, rank, full), **copies[rank]}
            for rank in ranks
        }
        outputs: list[list[torch.Tensor]] = []
        for k, values in enumerate(inputs, 1):
            computed = {
                run.named[name]: tensor
                for name, tensor in self.calls.computed(micro.captured).items()
                if name in run.named
            }
            results = run(
                {
                    rank: {**pieces_of[rank], **cut_pieces(run, values, rank), **counts[rank], **computed}
                    for rank in ranks
                },
                nth(k, len(inputs)),
            )
            for rank, (_, states) in results.items():
                pieces_of[rank] |= states
            outputs.append(joined_values(run, results))
        write_states(run, full, pieces_of)
        full |= state
        kept = {name: of for name, of in run.named.items() if name not in full}
        results = end(
            {
                rank: {
                    **cut_pieces(end, full, rank),
                    **{of: pieces_of[rank][kept[name]] for name, of in end.named.items() if name in kept},
                }
                for rank in ranks
            }
        )
        write_states(end, full, {rank: states for rank, (_, states) in results.items()})
        return joined_values(end, results), [
            join_whole(output, parts) for output, *parts in zip(micro.outputs, *outputs, strict=True)
        ]

    def copies(self, micro: MicroBatch, to: SimulatedRun, full: Mapping[str, torch.Tensor]) -> dict[int, Pieces]:
        """Make the low-precision copies that ``micro`` takes in the place of parameters.

        Returns rank → name in ``to`` → piece.
        """
        ranks = self.calls.mesh.ranks
        if micro.copy is None:
            return {rank: {} for rank in ranks}
        run = self.run_of(*micro.copy)
        results = run({rank: cut_pieces(run, full, rank) for rank in ranks}, COPIES)
        return {
            rank: {
                to.named[name]: states[run.named[copy_name(name)]] for name in run.named if copy_name(name) in run.named
            }
            for rank, (_, states) in results.items()
        }

    def counts(
        self,
        micro: MicroBatch,
        to: SimulatedRun,
        inputs: list[dict[str, torch.Tensor]],
        full: Mapping[str, torch.Tensor],
    ) -> dict[int, Pieces]:
        """Compute the counts that the micro-batches divide by: rank → name in ``to`` → count."""
        ranks = self.calls.mesh.ranks
        if micro.count is None:
            return {rank: {} for rank in ranks}
        run = self.run_of(*micro.count)
        tensors = {
            **full,
            **{batch_input_name(name, k): tensor for k, values in enumerate(inputs) for name, tensor in values.items()},
        }
        results = run({rank: cut_pieces(run, tensors, rank) for rank in ranks}, COUNTS)
        return {
            rank: {to.named[count_name(k)]: count for k, count in enumerate(returned)}
            for rank, (returned, _) in results.items()
        }

    def run_of(self, program: Program, local: Any) -> SimulatedRun:
        if id(program) not in self._runs:
            self._runs[id(program)] = SimulatedRun(program, local, SCALE in Results(program).named)
        return self._runs[id(program)]

    def forget(self, program: Program) -> None:
        """Drop a program that does not run again."""
        self._runs.pop(id(program), None)


def brought_pieces(inputs: CallInputs, mesh: Mesh) -> int:
    """Return the number of different pieces of the batch that the ranks bring; 0 if all ranks have the same batch."""
    counts = [mesh.count(inputs.layouts[name].dims[0][0][1]) for name in inputs.shapes if inputs.layouts[name].dims]
    return max(counts, default=0)


def joined_values(run: SimulatedRun, results: Mapping[int, tuple[list[torch.Tensor], Pieces]]) -> list[torch.Tensor]:
    """Return the full tensors of the pieces that a program, or a part of it, returned on all ranks.

    A part returns the first values of its program.
    """
    count = len(next(iter(results.values()))[0])
    return [
        join({rank: tensors[k] for rank, (tensors, _) in results.items()}, type, name)
        for k, (name, type) in enumerate(run.interface.returned[:count])
    ]


def cut_pieces(run: SimulatedRun, tensors: Mapping[str, torch.Tensor], rank: int) -> Pieces:
    """One rank's pieces of the tensors that a program takes, by the program's names."""
    at = run.interface.mesh.coordinates(rank)
    return {
        of: cut(tensors[name].detach(), run.interface.types[of], at).clone()
        for name, of in run.named.items()
        if name in tensors
    }


def zero_sums(run: SimulatedRun, rank: int, tensors: Mapping[str, torch.Tensor]) -> Pieces:
    """Return the zeros that sums begin with on one rank, on the device of the model's ``tensors``."""
    mesh, device = run.interface.mesh, next((tensor.device for tensor in tensors.values()), None)
    types = {of: run.interface.types[of] for of in map(run.named.__getitem__, run.sums)}
    return {
        of: torch.zeros(
            type.attr.local_shape(type.shape, mesh, mesh.coordinates(rank)), dtype=type.dtype, device=device
        )
        for of, type in types.items()
    }


def write_states(run: SimulatedRun, full: Mapping[str, torch.Tensor], held: Mapping[int, Pieces]) -> None:
    """Join the next values of states, and copy them to the full tensors."""
    for name, of in run.named.items():
        if of in run.states and name in full and of in next(iter(held.values())):
            full[name].copy_(join({rank: pieces[of] for rank, pieces in held.items()}, run.interface.types[of], of))
