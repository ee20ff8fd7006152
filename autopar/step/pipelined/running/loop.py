"""Run the slots of a schedule on one rank: the loop that every rank has, on real processes and simulated.

For each slot of the rank:

1. post the receives and launch the sends of the slot, together;
2. wait for the message that the first computation reads; then wait for the sends whose buffers the slot frees, and drop
   them: by the rule of ``pipeline.buffers`` they have arrived;
3. compute, pass after pass; a later pass waits for its message before it runs.

The loop decides nothing: which slot has which task is the schedule's, and what a pass computes is the program's. Its
memory does not grow with the number of micro-batches, because nothing is kept longer than the schedule says.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any

import torch

from autopar.pipeline import PipelineSchedule, Slot, Task
from autopar.pipeline.dataflow import source
from autopar.pipeline.task import RESHARD, UNSHARD
from autopar.runtime.lowering.tags import tag_of
from autopar.step.pipelined.placing.bundles import Bundle
from autopar.step.pipelined.running.messages import Message, Messages
from autopar.step.pipelined.running.stage_state import StageState

Loop = Generator[Any, Any, None]
DURING = {"F": "forward", "B": "backward"}


class PipelineLoop:
    """The slots of one rank.

    Args:
        schedule: the schedule, with messages and releases.
        position: the rank's position along the pipeline.
        stages: stage → its tensors and functions, for the stages of this rank.
        forward, backward: number of a boundary → this rank's part of its bundle in each direction, for the boundaries
            of these stages.
        messages: where the rank sends and receives.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        position: int,
        stages: Mapping[int, StageState],
        forward: Mapping[int, Bundle],
        backward: Mapping[int, Bundle],
        messages: Messages,
    ) -> None:
        self._schedule, self._position, self._stages, self._messages = schedule, position, stages, messages
        self._bundles = {"F": forward, "B": backward}
        self._last = "W" if schedule.is_split else "B"
        self._made: dict[Task, list[torch.Tensor]] = {}  # computation → its results that another stage reads
        self._buffers: dict[tuple[int, int], list[torch.Tensor]] = {}  # stage, micro-batch → received messages
        self._sending: set[Task] = set()

    def run(self) -> Loop:
        """Run all slots, and wait for the last sends."""
        for row in self._schedule.slots:
            slot = row[self._position]
            if slot:
                yield from self._slot(slot)
        for send in sorted(self._sending):
            yield from self._messages.wait(send)
        self._sending.clear()

    def _slot(self, slot: Slot) -> Loop:
        if slot.messages:
            with self._messages.during(slot.messages):
                self._messages.start([end for task in slot.messages for end in self._ends(task)])
        if not slot.compute:
            yield from self._free(slot)
        for k, task in enumerate(slot.compute):
            with self._messages.during(task):
                yield from self._receive(task)
                if k == 0:
                    yield from self._free(slot)
                yield from self._compute(task)
        for name, stage in slot.parameters:
            state = self._stages[stage]
            if name == UNSHARD:
                with self._messages.during(f"{name} of stage {stage}"):
                    yield from state.gather()
            elif name == RESHARD:
                state.drop_gathered()

    def _free(self, slot: Slot) -> Loop:
        for send in slot.free:
            yield from self._messages.wait(send)
            self._sending.discard(send)

    def _ends(self, task: Task) -> list[Message]:
        """Return the ends of a task's messages on this rank, one for each peer."""
        of, stage, batch = task.of, task.stage, task.batch
        boundary = min(stage, task.peer)
        bundle, tag = self._bundles[of][boundary], tag_of(boundary, DURING[of], batch)
        if task.action == "S":
            self._sending.add(task)
            packed = bundle.pack(self._made.pop(Task(f"{of}W", stage, batch)))
            return [Message(task, True, other, memory, tag, task.where) for other, memory in packed.items()]
        return [
            Message(task, False, other, self._messages.buffer(bytes), tag, task.where)
            for other, bytes in bundle.receives.items()
        ]

    def _receive(self, task: Task) -> Loop:
        """Wait for what a computation reads from another stage, and put it among its values."""
        of, stage, batch = task.of, task.stage, task.batch
        if of == "W":
            return
        boundary = stage - 1 if of == "F" else stage
        bundle = self._bundles[of].get(boundary)
        if bundle is None:
            return  # the first forward, or the last backward
        state = self._stages[stage]
        receive = source(task, self._schedule.rank_of)
        if receive is None:  # the other stage is on this rank, too
            made = self._made.pop(Task(task.kind, stage - 1 if of == "F" else stage + 1, batch))
            pieces = bundle.unpack({}, self._messages.device, made)
        else:
            received = yield from self._messages.wait(receive)
            self._buffers.setdefault((stage, batch), []).extend(received.values())
            pieces = bundle.unpack(received, self._messages.device)
        cut = state.stage.cut
        placeholders = cut.from_before if of == "F" else cut.from_behind
        values = zip(bundle.values, pieces, strict=True)
        state.kept[batch].update((placeholders[value.name], piece) for value, piece in values)

    def _compute(self, task: Task) -> Loop:
        of, stage, batch = task.of, task.stage, task.batch
        state = self._stages[stage]
        results = yield from state.run(task)
        # memory that the next messages are received in, and so no place for what is kept longer
        received = {_memory(buffer) for buffer in self._buffers.get((stage, batch), ())}
        if of == "F":
            state.keep_outputs(batch, results, received)
        self._keep_made(task, state, results, received)
        if of == self._last:
            state.end(batch)
            for buffer in self._buffers.pop((stage, batch), ()):
                self._messages.release(buffer)

    def _keep_made(
        self, task: Task, state: StageState, results: Mapping[str, torch.Tensor], received: Collection[int]
    ) -> None:
        """Keep the results that another stage reads, until they are sent."""
        of, cut, stage = task.of, state.stage.cut, state.stage
        if of == "F" and task.stage + 1 < self._schedule.stages:
            pieces = [results[stage.sent(value)[0]] for value in cut.up]
        elif of == "B" and task.stage > 0:
            kept = state.kept[task.batch]
            names = [stage.sent_back(value)[0] for value in cut.down]
            pieces = [results[name] if name in results else kept[name] for name in names]
        else:
            return
        # a value that is passed on, or a view of one, is in memory of a message
        self._made[task] = [piece.clone() if _memory(piece) in received else piece for piece in pieces]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
