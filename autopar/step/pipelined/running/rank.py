"""Run a whole pipelined step on one rank: from its pieces of parameters, state and inputs to their next values.

copies of parameters · counts · slots of the schedule · outputs · sums that go home · numbers of all stages · updates
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.nodes import name_of
from autopar.ir.program import Program
from autopar.ir.transfers import Ends
from autopar.ir.value_names import MEASURED, SQUARES, copy_name, count_name, gradient_name, sums_in, total_name
from autopar.runtime.interface import Interface
from autopar.scheduling.programs.order import donated_names
from autopar.step.compiling.compiled_step import Placed
from autopar.step.pipelined.placing.bundles import Bundle, Crossed
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage, Tied
from autopar.step.pipelined.placing.update import PipelinedUpdate, StageUpdate
from autopar.step.pipelined.running.exchange import Move, exchange, share_buffers
from autopar.step.pipelined.running.functions import Functions
from autopar.step.pipelined.running.loop import PipelineLoop
from autopar.step.pipelined.running.messages import Messages
from autopar.step.pipelined.running.outputs import outputs_to_share, share_outputs
from autopar.step.pipelined.running.stage_state import Gathers, StageState, Tensors
from autopar.step.pipelined.schedules import gathers_apart

# makes the functions of a program on this rank; the names are those of the placeholders that it may overwrite
MakeFunctions = Callable[[Placed, Sequence[str]], Functions]


class Called(NamedTuple):
    """What a program, or a phase of it, has returned.

    Attributes:
        returned: its returned values, by position.
        states: the next values of its states, by the user's names.
    """

    returned: dict[int, torch.Tensor]
    states: Tensors


@dataclass
class RankStep:
    """One rank of a pipelined step.

    Attributes:
        mesh: the whole mesh.
        rank: the rank.
        micro, update: the programs of the step.
        functions: makes functions of programs.
        messages: where the rank sends and receives.
    """

    mesh: Mesh
    rank: int
    micro: PipelinedMicro
    update: PipelinedUpdate
    functions: MakeFunctions
    messages: Messages
    _programs: dict[int, tuple[Functions, Interface, dict[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.position = self.mesh.coordinates(self.rank)[PIPELINE]
        schedule = self.micro.schedule
        self.stages = [self.micro.stages[number] for number in schedule.stages_of[self.position]]
        boundaries = {b for s in self.stages for b in (s.number - 1, s.number) if 0 <= b < schedule.stages - 1}
        self.forward = {b: Bundle(self.micro.forward_values(b), self.rank) for b in boundaries}
        self.backward = {b: Bundle(self.micro.backward_values(b), self.rank) for b in boundaries}
        self.tied = [
            (reader, Bundle([self._copied(tied, reader)], self.rank))
            for tied in self.micro.tied
            for reader in tied.readers
        ]
        self.homeward = [Bundle([sent.value], self.rank) for sent in self.update.homeward]
        self.buffers = [Bundle([value], self.rank) for value in self.micro.written_buffers]
        self.outputs = outputs_to_share(self.micro, self.rank)

    def _copied(self, tied: Tied, reader: int) -> Crossed:
        """Return a tied parameter as a stage reads it."""
        type = self.micro.stages[reader].types[tied.name]
        return Crossed(tied.name, Ends(type.shape, self.micro.layouts[tied.name], type.placed), type.dtype)

    def run(
        self, held: Tensors, inputs: Mapping[int, Sequence[Tensors]]
    ) -> Generator[Any, Any, tuple[Tensors, list[torch.Tensor]]]:
        """Run a step. States in ``held`` are updated in place.

        Returns the values of ``update.returns``, and this rank's pieces of the model's outputs, those of all
        micro-batches along a new first dim.

        Args:
            held: this rank's pieces of its parameters, of buffers, of the optimizer's state and of the numbers, by the
                user's names.
            inputs: stage → the inputs of each micro-batch, by the user's names.
        """
        read = dict(held)
        apart = gathers_apart(self.micro.schedule)
        for stage in self.stages if not apart else ():
            if stage.micro.copy is not None:
                with self.messages.during(f"the copies of parameters of stage {stage.number}"):
                    read |= yield from self._copies(stage, held)
        foreign = yield from self._copies_of_tied(held)
        states = {}
        for stage in self.stages:
            own = {**read, **foreign.get(stage.number, {})}
            own |= yield from self._counts(stage, own, inputs[stage.number])
            gathers = partial(self._gathered, stage, held) if apart else None
            states[stage.number] = self._state(stage, own, inputs[stage.number], gathers)
        del read, foreign
        loop = PipelineLoop(self.micro.schedule, self.position, states, self.forward, self.backward, self.messages)
        yield from loop.run()
        sums = {number: self._sums(state) for number, state in states.items()}
        made = {number: state.outputs for number, state in states.items()}
        del states, loop
        first = self.micro.schedule.stages
        yield from share_buffers(self.rank, held, self.buffers, self.messages, first)
        outputs = yield from share_outputs(self.rank, made, self.outputs, self.messages, first)
        received = yield from self._send_home(sums)
        return (yield from self._update(held, sums, received)), outputs

    # -- calls by name ---------------------------------------------------------------------------------------------

    def call(
        self,
        placed: Placed,
        phase: str,
        values: Tensors,
        written: frozenset[str] = frozenset(),
        results: Tensors | None = None,
    ) -> Generator[Any, Any, Called]:
        """Run one phase of a program.

        Args:
            values: by the user's names; those that it takes are removed from it.
            written: the states that it may overwrite.
            results: values that earlier phases left, by their names in the program; receives those of this one.
        """
        functions, interface, named = self._program(placed, written)
        function = functions.phase(phase)
        users = {of: name for name, of in named.items()}
        # values that are returned as they came
        returned = {k: values[users[of]] for k, (of, _) in enumerate(interface.returned) if users.get(of) in values}
        if function is None:
            return Called(returned, {})
        left = {} if results is None else results
        constants = {name: c.tensor for name, c in placed[0].constants.items() if c.tensor is not None}
        boxed = []
        for name in function.takes:
            if name in left:
                boxed.append(left[name])
            elif name in constants:
                boxed.append(constants[name])
            else:
                boxed.append(values[users[name]])
        gives = function.gives
        made = dict(zip(gives, (yield from function(boxed)), strict=True))
        left.update(made)
        returned |= {k: made[name] for k, (name, _) in enumerate(interface.returned) if name in made}
        states = {users[of]: made[name] for of, (name, _) in interface.states.items() if name in made}
        return Called(returned, states)

    def _program(self, placed: Placed, written: frozenset[str]) -> tuple[Functions, Interface, dict[str, str]]:
        program = placed[0]
        if id(program) not in self._programs:
            donated = donated_names(program, written) if written else []
            named = {name_of(node): node.name for node in program.placeholders}
            self._programs[id(program)] = self.functions(placed, donated), Interface.of(program), named
        return self._programs[id(program)]

    # -- before the first slot -------------------------------------------------------------------------------------

    def _copies(self, stage: Stage, held: Tensors) -> Generator[Any, Any, Tensors]:
        """Make the copies of parameters that a stage computes with: in low precision, or gathered."""
        if stage.micro.copy is None:
            return {}
        copies: Tensors = {}
        left: Tensors = {}
        for phase in ("forward", "update"):  # a gather without a cast is no part of an update
            copies |= (yield from self.call(stage.micro.copy, phase, dict(held), results=left)).states
        return {name: copies[copy_name(name)] for name in stage.types if copy_name(name) in copies}

    def _gathered(self, stage: Stage, held: Tensors) -> Generator[Any, Any, Tensors]:
        """Make these copies, by placeholder."""
        copies = yield from self._copies(stage, held)
        return {stage.named[name]: copy for name, copy in copies.items()}

    def _copies_of_tied(self, held: Tensors) -> Generator[Any, Any, dict[int, Tensors]]:
        """Send the tied parameters to the stages that read them: stage → name → its piece."""
        moves: list[Move] = []
        for _, bundle in self.tied:
            (value,) = bundle.values
            pieces = [held[value.name].to(value.dtype)] if self.rank in value.ends.source.mesh else []
            moves.append((bundle, pieces))
        first = self.micro.schedule.stages  # the boundaries of stages come before
        received = yield from exchange(self.rank, moves, self.messages, first, "the copies of tied parameters")
        copies: dict[int, Tensors] = {}
        for (reader, bundle), pieces in zip(self.tied, received, strict=True):
            if pieces:
                copies.setdefault(reader, {})[bundle.values[0].name] = pieces[0]
        return copies

    def _counts(self, stage: Stage, held: Tensors, inputs: Sequence[Tensors]) -> Generator[Any, Any, Tensors]:
        """Compute the mean counts of all micro-batches."""
        if stage.counting is None:
            return {}
        totals: dict[int, torch.Tensor] = {}
        with self.messages.during(f"the counts of all micro-batches of stage {stage.number}"):
            for values in inputs:
                sums = (yield from self.call(stage.counting.sums, "forward", {**held, **values})).returned
                totals = {k: totals[k] + value if k in totals else value for k, value in sums.items()}
            values = {**held, **inputs[0], **{total_name(k): total for k, total in totals.items()}}
            counts = (yield from self.call(stage.counting.counts, "forward", values)).returned
        return {count_name(k): count for k, count in counts.items()}

    def _state(self, stage: Stage, held: Tensors, inputs: Sequence[Tensors], gathers: Gathers | None) -> StageState:
        named, constants = stage.named, stage.program.constants
        by_placeholder = {named[name]: tensor for name, tensor in held.items() if name in named}
        by_placeholder |= {name: c.tensor for name, c in constants.items() if c.tensor is not None}
        each = [{named[name]: tensor for name, tensor in values.items() if name in named} for values in inputs]
        functions, _, _ = self._micro_functions(stage)
        return StageState(stage, functions, by_placeholder, each, self.messages.device, gathers)

    def _micro_functions(self, stage: Stage) -> tuple[Functions, Interface, dict[str, str]]:
        program: Program = stage.program
        if id(program) not in self._programs:
            functions = self.functions((program, stage.local), donated_names(program, ()))
            self._programs[id(program)] = functions, stage.interface, stage.named
        return self._programs[id(program)]

    # -- behind the last slot --------------------------------------------------------------------------------------

    @staticmethod
    def _sums(state: StageState) -> Tensors:
        """Return the sums of a stage, by the user's names."""
        names = sums_in(state.stage.program)
        return {name: state.held[of] for name, of in state.stage.named.items() if name in names and of in state.held}

    def _send_home(self, sums: Mapping[int, Tensors]) -> Generator[Any, Any, Tensors]:
        """Send the sums of tied parameters to their homes; return those that came here."""
        moves: list[Move] = []
        for sent, bundle in zip(self.update.homeward, self.homeward, strict=True):
            pieces = []
            if sent.reader in sums:
                name = gradient_name(sent.tied.name)
                with self.messages.during(f"the gradient of {sent.tied.name} of stage {sent.reader}"):
                    reduced = yield from self.call(sent.placed, "forward", {name: sums[sent.reader].pop(name)})
                pieces = [reduced.returned[0]]
            moves.append((bundle, pieces))
        first = self.micro.schedule.stages
        received = yield from exchange(self.rank, moves, self.messages, first, "the gradients of tied parameters")
        pairs = zip(self.update.homeward, received, strict=True)
        return {sent.value.name: pieces[0] for sent, pieces in pairs if pieces}

    def _update(self, held: Tensors, sums: Mapping[int, Tensors], received: Tensors) -> Generator[Any, Any, Tensors]:
        """Reduce the gradients, learn the numbers of all stages, and update this rank's parameters."""
        device = self.messages.device
        numbers = torch.zeros(3, dtype=torch.float64, device=device)
        left: dict[int, Tensors] = {}
        values: dict[int, Tensors] = {}
        for stage in self.stages:
            ending = self.update.stages[stage.number]
            if ending.placed is None:
                continue
            number = stage.number
            values[number], left[number] = {**held, **sums[number], **received}, {}
            with self.messages.during(f"the reduction of gradients of stage {number}"):
                called = yield from self.call(ending.placed, "reduction", values[number], ending.states, left[number])
            named = self._named(ending, called)
            for k, name in enumerate(("loss", "squares", "measured")):
                if name in named:
                    numbers[k] += named[name].to(torch.float64)
        ranks = self.mesh.group(self.rank, PIPELINE)
        vectors = yield from self.messages.gather(numbers, ranks)
        loss, squares, measured = torch.stack(vectors).sum(0).unbind()
        dtype = self._loss_dtype()
        returned = {"loss": loss.to(dtype)}
        nexts: Tensors = {}
        for stage in self.stages:
            ending = self.update.stages[stage.number]
            if ending.placed is None:
                continue
            own, number = values[stage.number], stage.number
            own |= self._in_their_dtypes(ending, {SQUARES: squares, MEASURED: measured})
            with self.messages.during(f"the update of stage {number}"):
                called = yield from self.call(ending.placed, "update", own, ending.states, left.pop(number))
            returned |= {
                name: value for name, value in self._named(ending, called).items() if name in self.update.returns[1:]
            }
            nexts |= called.states
        for name, value in nexts.items():
            if value is not held[name]:
                held[name].copy_(value)
        return returned

    @staticmethod
    def _named(ending: StageUpdate, called: Called) -> Tensors:
        return {ending.returns[k]: value for k, value in called.returned.items()}

    def _loss_dtype(self) -> torch.dtype:
        return next(stage.micro.loss.dtype for stage in self.micro.stages if stage.micro.loss is not None)

    @staticmethod
    def _in_their_dtypes(ending: StageUpdate, numbers: Tensors) -> Tensors:
        assert ending.placed is not None
        types = Interface.of(ending.placed[0]).types
        named = {name_of(node): node.name for node in ending.placed[0].placeholders}
        return {name: value.to(types[named[name]].dtype) for name, value in numbers.items() if name in named}
