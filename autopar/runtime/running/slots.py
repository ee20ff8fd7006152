"""Run the slots of a pipeline's schedule on one rank.

For each slot of the rank:

1. post the receives and launch the sends of the slot, together;
2. wait for the message that the first computation reads; then wait for the sends whose buffers the slot frees, and drop
   them: by the rule of ``pipeline.buffers`` they have arrived;
3. compute, pass after pass; a later pass waits for its message before it runs.

Nothing is decided here: which slot has which task is the schedule's, and what a pass computes is the program's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.pipeline import Slot, Task
from autopar.pipeline.dataflow import source
from autopar.pipeline.task import RESHARD, UNSHARD
from autopar.runtime.lowering.bundles import Bundle
from autopar.runtime.lowering.tags import tag_of
from autopar.runtime.running.messages import Message, Messages
from autopar.runtime.running.rank import Lines, RankRun, Tensors
from autopar.timetable import Entry

PHASES = {"F": "forward", "B": "backward", "W": "weight_gradients"}


@dataclass(frozen=True)
class StageMessages:
    """What one stage of a rank sends and receives in its passes; the values of both ends are in one order.

    Attributes:
        bundles: (boundary, F or B) → this rank's part of the message over it.
        received: F or B → the placeholders of what the pass reads of another stage.
        sent: F or B → the values of what another stage reads.
    """

    bundles: Mapping[tuple[int, str], Bundle]
    received: Mapping[str, Sequence[str]]
    sent: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class SlotFacts:
    """What all slots of a rank share.

    Attributes:
        rank_of: the position of each stage along the pipeline.
        last: the last pass of a micro-batch: F, B, or W where gradients of weights have passes of their own.
        stages: stage of the rank → its messages.
    """

    rank_of: tuple[int, ...]
    last: str
    stages: Mapping[int, StageMessages]


@dataclass(eq=False)
class SlotRunner:
    """The slots of one rank in one step.

    Attributes:
        facts: what they share.
        rank: the rank, with its programs and boxes.
        messages: where the rank sends and receives.
    """

    facts: SlotFacts
    rank: RankRun
    messages: Messages
    _made: dict[Task, list[torch.Tensor]] = field(default_factory=dict)  # pass → its results that another stage reads
    _buffers: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)  # of received messages
    _sending: set[Task] = field(default_factory=set)
    _begun: set[tuple[int, str]] = field(default_factory=set)  # the stages and passes whose sums have begun

    def end(self) -> Lines:
        """Wait for the last sends."""
        for send in sorted(self._sending):
            yield from self.messages.wait(send)
        self._sending.clear()

    def run(self, slot: Slot) -> Lines:
        """Run a slot."""
        messages = self.messages
        if slot.messages:
            with messages.during(slot.messages):
                messages.start([end for task in slot.messages for end in self._ends(task)])
        if not slot.compute:
            yield from self._free(slot)
        for k, task in enumerate(slot.compute):
            with messages.during(task):
                yield from self._receive(task)
                if k == 0:
                    yield from self._free(slot)
                yield from self._compute(task)
        for name, stage in slot.parameters:
            if name == UNSHARD:
                with messages.during(f"{name} of stage {stage}"):
                    yield from self.rank.call(Entry("gather", stage=stage), f"{name} of stage {stage}")
            elif name == RESHARD:
                self._drop_gathered(stage)

    def _free(self, slot: Slot) -> Lines:
        for send in slot.free:
            yield from self.messages.wait(send)
            self._sending.discard(send)

    def _drop_gathered(self, stage: int) -> None:
        """Free what was gathered. Copies of parameters of other stages stay."""
        made = self.rank.programs["gather", stage].copied if ("gather", stage) in self.rank.programs else ()
        box = self.rank.boxes["copies", stage]
        for name in made:
            del box[name]

    def _ends(self, task: Task) -> list[Message]:
        """Return the ends of a task's messages on this rank, one for each peer."""
        of, stage, batch = task.of, task.stage, task.batch
        boundary = min(stage, task.peer)
        bundle, tag = self.facts.stages[stage].bundles.get((boundary, of)), tag_of(boundary, PHASES[of], batch)
        if bundle is None:
            return []  # nothing crosses this boundary
        if task.action == "S":
            self._sending.add(task)
            packed = bundle.pack(self._made.pop(Task(f"{of}W", stage, batch)))
            return [Message(task, True, other, memory, tag, task.where) for other, memory in packed.items()]
        return [
            Message(task, False, other, self.messages.buffer(bytes), tag, task.where)
            for other, bytes in bundle.receives.items()
        ]

    def _receive(self, task: Task) -> Lines:
        """Wait for what a computation reads from another stage, and put it among its values."""
        of, stage, batch = task.of, task.stage, task.batch
        if of == "W":
            return
        about = self.facts.stages[stage]
        bundle = about.bundles.get((stage - 1 if of == "F" else stage, of))
        if bundle is None:
            return  # the first forward, or the last backward
        receive = source(task, self.facts.rank_of)
        if receive is None:  # the other stage is on this rank, too, and gives its values the layouts of this one
            pieces = self._made.pop(Task(task.kind, stage - 1 if of == "F" else stage + 1, batch))
        else:
            received = yield from self.messages.wait(receive)
            self._buffers.setdefault((stage, batch), []).extend(received.values())
            pieces = bundle.unpack(received, self.messages.device)
        self.rank.kept["micro", stage, batch].update(zip(about.received[of], pieces, strict=True))

    def _compute(self, task: Task) -> Lines:
        of, stage, batch = task.of, task.stage, task.batch
        # memory that the next messages are received in, and so no place for what is kept longer
        received = {_memory(buffer) for buffer in self._buffers.get((stage, batch), ())}
        zeros = (stage, of) not in self._begun
        self._begun.add((stage, of))
        entry = Entry("micro", PHASES[of], stage, batch)
        made = yield from self.rank.run_part(
            self.rank.programs["micro", stage], entry, task, zeros=zeros, received=received
        )
        self._keep_made(task, made, received)
        if of == self.facts.last:
            self.rank.kept.pop(("micro", stage, batch), None)
            for buffer in self._buffers.pop((stage, batch), ()):
                self.messages.release(buffer)

    def _keep_made(self, task: Task, made: Tensors, received: Collection[int]) -> None:
        """Keep the results that another stage reads, until they are sent."""
        names = self.facts.stages[task.stage].sent.get(task.of)
        if names is None:
            return
        kept = self.rank.kept["micro", task.stage, task.batch]
        pieces = [made[name] if name in made else kept[name] for name in names]
        # a value that is passed on, or a view of one, is in memory of a message
        self._made[task] = [piece.clone() if _memory(piece) in received else piece for piece in pieces]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
