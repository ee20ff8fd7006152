"""Run a call of a model on stages on one rank: its forward, from stage to stage. The outputs go to all stages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.transfers import Ends
from autopar.runtime.lowering.tags import tag_of
from autopar.step.compiling.compiled_step import Placed
from autopar.step.pipelined.calls.staged_call import StagedCall
from autopar.step.pipelined.placing.bundles import Bundle, Crossed
from autopar.step.pipelined.placing.programs import CutStage, forward_values, written_buffers
from autopar.step.pipelined.running.exchange import Move, exchange, share_buffers
from autopar.step.pipelined.running.functions import Functions
from autopar.step.pipelined.running.messages import Message, Messages
from autopar.step.pipelined.running.stage_state import Tensors

Run = Generator[Any, Any, list[torch.Tensor]]


@dataclass
class RankCall:
    """One rank of a staged call.

    Attributes:
        rank: the rank.
        call: the call.
        functions: makes functions of programs.
    """

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
        written = [Bundle([value], self.rank) for value in written_buffers(self.call.stages)]
        yield from share_buffers(self.rank, held, written, messages, len(self.call.stages))
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
