"""Compute what a pipelined step keeps in memory, for ``pipeline.memory``: the bytes of a stage's values on one rank.

A pass leaves values to later passes; the messages that it receives and sends are counted apart, as buffers. Storages
count once, however many views they have. Kernels' own buffers are not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from autopar.ir.nodes import operands, record_of, tensor_type
from autopar.ir.record import TensorType
from autopar.ir.value_names import ValueRole, copy_name, roles_in, sums_in
from autopar.pipeline import Sizes
from autopar.report.liveness import START, Storage, liveness
from autopar.runtime.localize import localize
from autopar.runtime.lowering.bundles import Bundle
from autopar.scheduling.programs.apply import scheduled
from autopar.scheduling.programs.functions import piece_bytes
from autopar.scheduling.programs.order import OF_STAGES, lines_of
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage
from autopar.step.pipelined.placing.share import outputs_of_stages
from autopar.step.pipelined.runs import stage_messages, types_of_held

PASSES = ("forward", "backward", "weight_gradients")


@dataclass(frozen=True)
class StageSizes:
    """The bytes of one stage on its first rank, which has the largest pieces.

    Attributes:
        activation: what the forward keeps for later passes, beside the message that it has received.
        for_weights: what is kept for the weight gradients after the backward.
        boundary: the larger one of the two messages between the stage and the next one; 0 on the last stage.
        sums: the sums of gradients, and of the loss.
        copies: the copies of parameters that live during a step: in low precision, and of tied ones.
        workspace: what each of ``PASSES`` needs while it runs, beyond what is counted above.
        held: what is there between steps: parameters, buffers, the optimizer's state; and the inputs.
        inputs: of ``held``, the inputs of all micro-batches.
        outputs: what the step returns of all micro-batches, made by this stage.
    """

    activation: int
    for_weights: int
    boundary: int
    sums: int
    copies: int
    workspace: tuple[int, ...]
    held: int
    inputs: int
    outputs: int

    @property
    def fixed(self) -> int:
        """What the stage needs during the whole step."""
        return self.sums + self.copies + self.held + self.outputs


def sizes_of(micro: PipelinedMicro, update: StepUpdate, offload: bool = False) -> Sizes:
    """Return the sizes of a pipelined step, in bytes. Linear in its programs.

    ``offload``: whether the optimizer's state is in host memory.
    """
    return as_sizes(stage_sizes(micro, update, offload))


def as_sizes(stages: Iterable[StageSizes]) -> Sizes:
    """Return the sizes of all stages, in their order."""
    rows = list(stages)
    return Sizes(
        activation=[row.activation for row in rows],
        for_weights=[row.for_weights for row in rows],
        boundary=[row.boundary for row in rows[:-1]] or 0,
        fixed=[row.fixed for row in rows],
        in_forward=[row.workspace[0] for row in rows],
        in_backward=[row.workspace[1] for row in rows],
        in_weight=[row.workspace[2] for row in rows],
        pooled=True,
    )


def stage_sizes(micro: PipelinedMicro, update: StepUpdate, offload: bool = False) -> list[StageSizes]:
    """Return the sizes of each stage. ``offload``: as of ``sizes_of``."""
    return [_StageMemory(micro, update, stage, offload).sizes() for stage in micro.stages]


class _StageMemory:
    """Computes the sizes of one stage.

    A pass is a number: 0 is the forward, 1 the backward, 2 the weight gradients.
    """

    def __init__(self, micro: PipelinedMicro, update: StepUpdate, stage: Stage, offload: bool) -> None:
        self.micro, self.update, self.stage, self.offload = micro, update, stage, offload
        number, first = stage.number, stage.mesh.ranks[0]
        bundles = stage_messages(micro.program, number, first).bundles
        self.up, self.down, self.before, self.behind = (  # sent, sent back, received
            bundles.get(key, Bundle((), first))
            for key in ((number, "F"), (number - 1, "B"), (number - 1, "F"), (number, "B"))
        )
        local = localize(stage.program, stage.mesh.coordinates(first))
        self.life = liveness(scheduled(local, lines_of(stage.program, OF_STAGES)))
        self.passes = [PASSES.index(record_of(node).phase) for node in self.life.ops]
        self.born = self._births()
        self.read = self._reads()
        # one value is sent from its own memory
        is_value = len(self.up.values) == len(self.up.sends) == 1
        self.shared = self._named(stage.sent(value)[0] for value in stage.cut.up) if is_value else set()

    def sizes(self) -> StageSizes:
        activation, for_weights = self._kept(0), self._kept(1)
        sent, sent_back = sum(self.up.sends.values()), sum(self.down.sends.values())
        counted = (activation + sent, activation + sent_back, for_weights)  # while a pass runs
        workspace = tuple(max(0, need - part) for need, part in zip(self._needs(), counted, strict=True))
        boundary = max(sent, sum(self.behind.receives.values()))
        stage, homes, batches = self.stage, self.micro.homes, self.micro.schedule.batches
        sums = sums_in(stage.program)
        copies = {copy_name(name) for name in homes}
        copies |= {name for name in stage.parameters if homes.get(name, stage.number) != stage.number}
        inputs = self._inputs() * batches
        outputs = sum(piece_bytes(output.type) for output in outputs_of_stages([stage])) * batches
        return StageSizes(
            activation, for_weights, boundary, _bytes(stage.types, sums), _bytes(stage.types, copies), workspace,
            self._held() + inputs, inputs, outputs,
        )  # fmt: skip

    # -- storages ----------------------------------------------------------------------------------------------------

    def _births(self) -> dict[Storage, int]:
        """Return the pass in which each storage is made. Messages are not among them."""
        born = {storage: self.passes[storage.born] for storage in self.life.storages if storage.born != START}
        for at, message, names in ((0, self.before, self.stage.cut.from_before),
                                   (1, self.behind, self.stage.cut.from_behind)):  # fmt: skip
            if not message.receives:  # the other stage is on this rank, and leaves its values to this one
                born |= dict.fromkeys(self._named(names.values()), at)
        return born

    def _named(self, names: Iterable[str]) -> set[Storage]:
        """Return the storages of values."""
        wanted = set(names)
        return {
            storage for node, parts in self.life.of.items() if node.name in wanted for part in parts for storage in part
        }

    def _reads(self) -> dict[Storage, int]:
        """Return for each storage the number of its last reader among the ops."""
        read: dict[Storage, int] = {}
        for position, node in enumerate(self.life.ops):
            for value in operands(node):
                read |= {storage: position for part in self.life.of[value] for storage in part}
        return read

    def _last_pass(self, storage: Storage) -> int:
        return self.passes[self.read[storage]] if storage in self.read else -1

    def _kept(self, after: int) -> int:
        """Return the bytes that are kept when a pass has ended, for later ones."""
        kept = (s for s, born in self.born.items() if born <= after < self._last_pass(s) and s not in self.shared)
        return sum(storage.bytes for storage in kept)

    # -- what passes need --------------------------------------------------------------------------------------------

    def _needs(self) -> list[int]:
        """Return for each pass the most bytes that a micro-batch has while it runs, beside messages received."""
        changes = [[0] * (len(self.life.ops) + 1) for _ in PASSES]
        given = self._given()
        first = {at: self.passes.index(at) for at in set(self.passes)}
        for storage, born in self.born.items():
            last = self._last_pass(storage)
            for at in first:
                if not born <= at <= max(born, last):
                    continue
                begin = max(storage.born, first[at])
                stays = last > at or (at == born and storage in given)
                end = self._end(at) if stays else max(begin, self.read.get(storage, begin))
                changes[at][begin] += storage.bytes
                changes[at][end + 1] -= storage.bytes
        return [max(accumulate(changes[at])) if at in first else 0 for at in range(len(PASSES))]

    def _end(self, at: int) -> int:
        """Return the last op of a pass."""
        return len(self.passes) - 1 - self.passes[::-1].index(at)

    def _given(self) -> set[Storage]:
        """Return what is sent to other stages."""
        stage = self.stage
        sent = (stage.sent(value)[0] for value in stage.cut.up)
        sent_back = (stage.sent_back(value)[0] for value in stage.cut.down)
        return self._named((*sent, *sent_back))

    # -- what lives longer than a micro-batch ------------------------------------------------------------------------

    def _held(self) -> int:
        stage = self.stage
        types = types_of_held(self.micro, self.update, stage)
        roles = roles_in(self.update.program) if self.offload else {}
        elsewhere = {name for name, (role, _) in roles.items() if role is ValueRole.STATE}
        own = {name for name in types if self.micro.homes.get(name, stage.number) == stage.number}
        return _bytes(types, own - elsewhere)

    def _inputs(self) -> int:
        stage = self.stage
        received = {*stage.cut.from_before.values(), *stage.cut.from_behind.values()}
        return sum(
            piece_bytes(tensor_type(node))
            for node in stage.program.placeholders
            if record_of(node).role == "input" and node.name not in received
        )


def _bytes(types: Mapping[str, TensorType], names: Collection[str]) -> int:
    """Return the bytes of those values that have one of the names."""
    return sum(piece_bytes(type) for name, type in types.items() if name in names)
