"""Call a model whose parameters are on the stages of a pipeline: its forward, from stage to stage.

There are no gradients. Each op runs on the last of the stages that keep its parameters or make its operands, so the
call needs no cut of its own. The outputs go to all stages, so that every rank returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.capture import Captured
from autopar.capture.guards import GuardedCall
from autopar.capture.model_state import ModelState
from autopar.gc_pause import gc_paused
from autopar.ir.layout import layout_of
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.nodes import name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.streams import DEFAULT, group_key
from autopar.ir.transfers import Ends
from autopar.model.calls import Calls
from autopar.model.captures import Captures, about_recapture
from autopar.model.compiled import Compiler
from autopar.model.dtensor_parameters import local_of
from autopar.model.inputs import CallInputs
from autopar.model.stage_homes import StageHomes
from autopar.report.progress import doing
from autopar.runtime.lowering.tags import tag_of
from autopar.runtime.modes import as_captured
from autopar.runtime.simulation.pieces import cut as cut_piece
from autopar.runtime.simulation.pieces import join
from autopar.runtime.simulation.simulate import run_together
from autopar.step.compiled_step import Placed
from autopar.step.pipelined.assignment import Assignment, computed_anywhere
from autopar.step.pipelined.bundles import Bundle, Crossed
from autopar.step.pipelined.exchange import Move, exchange
from autopar.step.pipelined.functions import Functions, ProcessFunctions, SimulatedFunctions
from autopar.step.pipelined.messages import Mail, Message, Messages, Pool, ProcessMessages, SimulatedMessages
from autopar.step.pipelined.programs import CutStage, forward_values
from autopar.step.pipelined.runs import inputs_of
from autopar.step.pipelined.stage_programs import cut_program
from autopar.step.pipelined.stage_state import Tensors
from autopar.verify.levels import verify

Run = Generator[Any, Any, list[torch.Tensor]]


@dataclass(frozen=True)
class StagedCall:
    """A captured call, cut into the stages of a pipeline.

    Attributes:
        captured: the call.
        stages: its stages.
        homes: where the parameters are.
        outputs: for each output the stage that makes it, its name there, and its type.
    """

    captured: Captured
    stages: tuple[CutStage, ...]
    homes: StageHomes
    outputs: tuple[tuple[int, str, TensorType], ...]

    @property
    def text(self) -> str:
        """The programs, as text that ranks compare."""
        return "\n".join(str(stage.program) for stage in self.stages)

    def bundles(self) -> list[Crossed]:
        """Return the outputs as they go to each position along the pipeline, output by output."""
        positions = dict.fromkeys(stage.mesh for stage in self.stages)
        return [
            Crossed(name, Ends(type.shape, type.placed, layout_of(there, type.attr)), type.dtype)
            for _, name, type in self.outputs
            for there in positions
        ]


@doing("parallelize")
@gc_paused()
def compile_staged(compiler: Compiler, inputs: CallInputs, homes: StageHomes, notes: Sequence[str]) -> StagedCall:
    """Capture a call without gradients, and cut it by the homes of its parameters."""
    attrs = {name: layout.attr for name, layout in homes.layouts.items()}
    compiler = replace(compiler, mesh=homes.meshes[0], homes={**compiler.homes, **attrs}, whole=False)
    captured, constraints, _ = compiler.capture(inputs, notes)
    assignment = assigned_by_homes(captured.program, homes)
    parts = cut_program(captured.program, assignment, captured.device)
    stages: list[CutStage] = []
    for number, (mesh, part) in enumerate(zip(homes.meshes, parts, strict=True)):
        verify(part.program, "cut")
        own = dict(constraints)
        if stages:
            own |= {part.from_before[value]: stages[-1].sent(value)[1].attr for value in part.from_before}
        local, _, _ = replace(compiler, mesh=mesh).place(part.program, own, captured.device)
        stages.append(CutStage(number, mesh, part, part.program, local))
    outputs: dict[int, tuple[int, str, TensorType]] = {}
    for stage in stages:
        for position, k in stage.cut.outputs.items():
            name, type = stage.interface.returned[k]
            outputs[position] = stage.number, name, type
    return StagedCall(captured, tuple(stages), homes, tuple(outputs[k] for k in sorted(outputs)))


def assigned_by_homes(program: Program, homes: StageHomes) -> Assignment:
    """Assign each op of a forward to the last of the stages of its operands and its parameters. Linear in the graph."""
    anywhere = computed_anywhere(program)
    home: dict[fx.Node, int] = {}  # parameters, and what is computed of one parameter on any stage
    stage: dict[fx.Node, int] = {}
    for node in program.nodes:
        if node.op == "placeholder" and record_of(node).role == "param":
            home[node] = homes.stage.get(name_of(node), 0)
        elif node in anywhere:
            read = [home[value] for value in operands(node) if value in home]
            home |= dict.fromkeys([node] * bool(read), max(read, default=0))
        elif node.op == "call_function":
            read = [stage.get(value, home.get(value, 0)) for value in operands(node)]
            stage[node] = max(read, default=0)
    return Assignment(len(homes.meshes), stage, anywhere)


@dataclass
class RankCall:
    """One rank of a staged call.

    Attributes:
        mesh: the whole mesh.
        rank: the rank.
        call: the call.
        functions: makes functions of programs.
    """

    mesh: Mesh
    rank: int
    call: StagedCall
    functions: Callable[[Placed], Functions]
    _made: dict[int, Functions] = field(default_factory=dict)

    def run(self, held: Tensors, inputs: Mapping[int, Tensors], messages: Messages) -> Run:
        """Run the forward. Returns this rank's pieces of all outputs.

        Args:
            held: the rank's pieces of the parameters and buffers that it keeps, by the user's names.
            inputs: stage → its inputs, by the user's names.
        """
        copies = yield from self._copies(held, messages)
        sent: dict[int, list[torch.Tensor]] = {}
        made: dict[str, torch.Tensor] = {}
        for stage in self.call.stages:
            if self.rank not in stage.mesh:
                continue
            values = {**held, **copies.get(stage.number, {}), **inputs[stage.number]}
            by_placeholder = {stage.named[name]: value for name, value in values.items() if name in stage.named}
            with messages.during(f"the forward of stage {stage.number}"):
                if stage.number:
                    by_placeholder |= yield from self._receive(stage, sent, messages)
                results = yield from self._forward(stage, by_placeholder)
            made |= {name: results[name] for number, name, _ in self.call.outputs if number == stage.number}
            if stage.number + 1 < len(self.call.stages):
                sent[stage.number] = [results[stage.sent(value)[0]] for value in stage.cut.up]
                self._send(stage, sent, messages)
        for stage in self.call.stages[:-1]:
            if ("send", stage.number) in self._sending:
                yield from messages.wait(("send", stage.number))
        return (yield from self._outputs(made, messages))

    def _forward(self, stage: CutStage, values: Tensors) -> Generator[Any, Any, Tensors]:
        if stage.number not in self._made:
            self._made[stage.number] = self.functions((stage.program, stage.local))
        function = self._made[stage.number].phase("forward")
        constants = {name: c.tensor for name, c in stage.program.constants.items() if c.tensor is not None}
        if function is None:
            return values
        boxed = [constants[name] if name in constants else values[name] for name in function.takes]
        results = dict(zip(function.gives, (yield from function(boxed)), strict=True))
        for state, (name, _) in stage.interface.states.items():
            values[state].copy_(results[name])
        return {**values, **results}

    def __post_init__(self) -> None:
        self._sending: set[tuple[str, int]] = set()

    def _bundle(self, boundary: int) -> Bundle:
        return Bundle(forward_values(*self.call.stages[boundary : boundary + 2]), self.rank)

    def _send(self, stage: CutStage, sent: dict[int, list[torch.Tensor]], messages: Messages) -> None:
        bundle, tag, task = self._bundle(stage.number), tag_of(stage.number, "forward", 0), ("send", stage.number)
        if not bundle.sends:
            return
        packed = bundle.pack(sent[stage.number])
        words = f"what stage {stage.number + 1} reads"
        messages.start([Message(task, True, other, memory, tag, words) for other, memory in packed.items()])
        self._sending.add(task)

    def _receive(
        self, stage: CutStage, sent: Mapping[int, list[torch.Tensor]], messages: Messages
    ) -> Generator[Any, Any, Tensors]:
        boundary = stage.number - 1
        bundle, tag, task = self._bundle(boundary), tag_of(boundary, "forward", 0), ("receive", boundary)
        received: dict[int, torch.Tensor] = {}
        if bundle.receives:
            words = f"what stage {boundary + 1} reads"
            messages.start([
                Message(task, False, other, messages.buffer(bytes), tag, words)
                for other, bytes in bundle.receives.items()
            ])  # fmt: skip
            received = yield from messages.wait(task)
        pieces = bundle.unpack(received, messages.device, sent.get(boundary, ()))
        return {stage.cut.from_before[value.name]: piece for value, piece in zip(bundle.values, pieces, strict=True)}

    def _copies(self, held: Tensors, messages: Messages) -> Generator[Any, Any, dict[int, Tensors]]:
        """Send parameters to the stages that read them and do not keep them."""
        moves: list[Move] = []
        readers = []
        homes = self.call.homes
        for stage in self.call.stages:
            for name in stage.parameters:
                if homes.stage.get(name, stage.number) == stage.number:
                    continue
                home, type = homes.layouts[name], stage.types[name]
                pieces = [held[name].to(type.dtype)] if self.rank in home.mesh else []
                value = Crossed(name, Ends(type.shape, home, type.placed), type.dtype)
                moves.append((Bundle([value], self.rank), pieces))
                readers.append((stage.number, name))
        words = "the copies of tied parameters"
        received = yield from exchange(self.rank, moves, messages, len(self.call.stages), words)
        copies: dict[int, Tensors] = {}
        for (number, name), pieces in zip(readers, received, strict=True):
            if pieces:
                copies.setdefault(number, {})[name] = pieces[0]
        return copies

    def _outputs(self, made: Mapping[str, torch.Tensor], messages: Messages) -> Run:
        """Send the outputs to all stages."""
        moves = []
        for value in self.call.bundles():
            pieces = [made[value.name]] if self.rank in value.ends.source.mesh else []
            moves.append((Bundle([value], self.rank), pieces))
        received = yield from exchange(self.rank, moves, messages, len(self.call.stages), "the outputs")
        return [pieces[0] for pieces in received if pieces]


class StagedCalls:
    """The calls of a model whose parameters are on stages.

    Args:
        calls: the calls of the model; they know where the parameters are.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._captures: Captures[StagedCall] = Captures()
        self._ranks: dict[int, dict[int, RankCall]] = {}
        self._homes: StageHomes | None = None

    def known(self, inputs: CallInputs, state: ModelState) -> GuardedCall:
        """Return the call with the values that forward would read now."""
        if self._homes is not self._calls.homes:
            self._captures, self._ranks, self._homes = Captures(), {}, self._calls.homes
        return self._captures.call(self._calls.key(inputs, state), state.modules)

    def compiled(self, inputs: CallInputs, call: GuardedCall) -> StagedCall:
        """Return the capture of a call; capture it first if it is new. All ranks call it."""
        calls = self._calls
        if not call.known:
            assert self._homes is not None
            notes = about_recapture(call.key, self._captures.keys, call.changes, calls.recapture)
            compiler = replace(calls.compiler, numbers=call.numbers)
            made = compile_staged(compiler, inputs, self._homes, notes)
            calls.agreement.compare_programs(made.text, made.captured.guards)
            self._captures.add(call, made.captured.guards, made)
        return self._captures[call]

    def here(self, call: StagedCall, inputs: CallInputs, state: ModelState) -> list[torch.Tensor]:
        """Run a call on this rank; return its pieces of the outputs."""
        calls = self._calls
        context, job = calls.context(), calls.job
        device = torch.device("cpu") if job is None else job.device
        groups = {} if job is None else job.groups

        def functions(placed: Placed) -> Functions:
            return ProcessFunctions(placed[0], placed[1][context.rank], groups, device, [])

        ranks = self._ranks.setdefault(id(call), {})
        if context.rank not in ranks:
            ranks[context.rank] = RankCall(calls.mesh, context.rank, call, functions)
        held = {name: local_of(tensor) for name, tensor in (*state.parameters, *state.buffers)}
        calls.agreement.wait()  # before any other message
        computed = calls.computed(call.captured)
        own = [stage for stage in call.stages if context.rank in stage.mesh]
        each = {stage.number: inputs_of(stage, [inputs], [computed], context.rank)[0] for stage in own}
        group = groups.get(group_key(calls.mesh.group(context.rank, PIPELINE), DEFAULT), "")
        messages = ProcessMessages(device, group, Pool(device))
        run = ranks[context.rank].run(held, each, messages)
        with as_captured():
            try:
                next(run)
            except StopIteration as end:
                return list(end.value)
        raise AssertionError("a real rank waits inside of its calls")

    def simulated(self, call: StagedCall, inputs: CallInputs, state: ModelState) -> list[torch.Tensor]:
        """Run a call on all simulated ranks; return the full outputs."""
        calls, mail = self._calls, Mail()
        full = {name: tensor.detach() for name, tensor in (*state.parameters, *state.buffers)}
        computed = calls.computed(call.captured)
        pieces: dict[int, list[torch.Tensor]] = {}
        buffers: dict[str, tuple[TensorType, dict[int, torch.Tensor]]] = {}

        def run(rank: int) -> Generator[Any, Any, None]:
            held: Tensors = {}
            each = {}
            for stage in call.stages:
                if rank not in stage.mesh:
                    continue
                each[stage.number] = inputs_of(stage, [inputs], [computed], rank)[0]
                for name, type in stage.types.items():
                    if name in full and call.homes.stage.get(name, stage.number) == stage.number:
                        layout = call.homes.layouts.get(name)
                        home = type if layout is None else TensorType(type.shape, full[name].dtype, layout)
                        held[name] = cut_piece(full[name], home, home.mesh.coordinates(rank)).clone()
                        if stage.named[name] in stage.interface.states:
                            buffers.setdefault(name, (home, {}))[1][rank] = held[name]
            made = RankCall(calls.mesh, rank, call, lambda placed: SimulatedFunctions(placed[1][rank], rank))
            pieces[rank] = yield from made.run(held, each, SimulatedMessages(rank, mail))

        with as_captured():
            run_together({rank: run(rank) for rank in calls.mesh.ranks})
        for name, (type, of_ranks) in buffers.items():
            full[name].copy_(join(of_ranks, type, name))
        return [
            join({rank: pieces[rank][k] for rank in type.mesh.ranks}, type, name)
            for k, (_, name, type) in enumerate(call.outputs)
        ]
