"""Run the lines of a timetable on one rank: the generator that every rank has, on real processes and simulated.

It decides nothing: which program runs when, on which micro-batch, and what it hands on, is the timetable's; what a
program computes is the program's. What is handed on has a word of ``timetable.GROUPS``, and a box for each stage, or
one for all stages (``OF_ALL``). Beside the inputs, and the outputs if they are returned, its memory does not grow with
the number of micro-batches, because no box keeps anything longer than the timetable says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autopar.pipeline import Slot
from autopar.runtime.running.functions import Where
from autopar.runtime.running.programs import HELD, INPUT, RankProgram, output_name
from autopar.scheduling.programs.run_parts import PIECES
from autopar.timetable import Entry
from autopar.timetable.entry import Line

Tensors = dict[str, torch.Tensor]
Lines = Generator[Any, Any, None]
ProgramKey = tuple[str, int | None]  # its name, and the stage
NOTHING: frozenset[str] = frozenset()
STACKED = ".outputs."
OF_ALL = ("counts", "totals", "started")  # what is handed on by all stages together


class Slots(Protocol):
    """Runs the slots of a pipeline's schedule on a rank."""

    def run(self, slot: Slot) -> Lines: ...

    def end(self) -> Lines:
        """Wait for the last sends."""
        ...


@dataclass(eq=False)
class RankRun:
    """One rank of a step or a call, with what it has in its hands.

    Attributes:
        programs: (name, stage) → a program of the timetable.
        held: what stays between steps, and the numbers that a step reads, by the user's names; updated in place.
        inputs: stage → the inputs of each micro-batch, by the user's names.
        device: where sums begin.
        during: a line → a block in which it runs, with its words for errors.
        batches: the inputs of all micro-batches, by their names in the program of the counts.
        boxes: (word of a timetable, stage) → what is handed on, by the user's names.
        kept: (program, stage, micro-batch) → what a phase leaves to later ones, by name in the program.
        outputs: (stage, micro-batch) → the outputs of the model, by their labels.
        returned: what the step or the call returns, by its labels.
        written: the next values of what stays between steps, until the line that makes them has run.
    """

    programs: Mapping[ProgramKey, RankProgram]
    held: Tensors
    inputs: dict[int | None, list[Tensors]]
    device: torch.device
    during: Callable[[Entry], tuple[Where, AbstractContextManager[Any]]]
    batches: Tensors = field(default_factory=dict)
    boxes: dict[tuple[str, int | None], Tensors] = field(default_factory=lambda: defaultdict(dict))
    kept: dict[tuple[str, int | None, int | None], Tensors] = field(default_factory=lambda: defaultdict(dict))
    outputs: dict[tuple[int | None, int | None], Tensors] = field(default_factory=lambda: defaultdict(dict))
    returned: Tensors = field(default_factory=dict)
    written: Tensors = field(default_factory=dict)

    def run(self, lines: Iterable[Line], slots: Callable[[RankRun], Slots] | None = None) -> Lines:
        """Run lines of a timetable."""
        runner: Slots | None = None
        for line in lines:
            if isinstance(line, Slot):
                assert slots is not None
                runner = runner or slots(self)
                yield from runner.run(line)
                continue
            if runner is not None:
                yield from runner.end()
                runner = None
            where, block = self.during(line)
            with block:
                yield from self.call(line, where)
            for name, value in self.written.items():
                self.held[name].copy_(value)
            self.written.clear()
        if runner is not None:
            yield from runner.end()

    def call(self, entry: Entry, where: Where) -> Lines:
        """Run one line."""
        yield from self.run_part(
            self.programs[entry.program, entry.stage], entry, where, zeros="sums" not in entry.takes,
            copies="copies" in entry.takes, empties=entry.empties,
        )  # fmt: skip

    def run_part(
        self, program: RankProgram, entry: Entry, where: Where, *, zeros: bool, copies: bool = True,
        empties: Collection[str] = (), received: Collection[int] | None = None,
    ) -> Generator[Any, Any, Tensors]:  # fmt: skip
        """Run a part of a program. Returns what it has made, by name in the program.

        Args:
            entry: the part, the stage and the micro-batch.
            zeros: whether sums begin in it.
            copies: whether copies of parameters take their place.
            empties: the boxes whose values nothing takes later.
            received: where the memory of messages begins, which others are received in; outputs are not kept there.
        """
        name, part, stage, batch = entry[:4]
        function = program.functions.part(part, zeros and bool(program.sums))
        results = program.results(part)
        if function is None:
            unchanged = [value for value in results.returned.values() if value in program.names]
            made = {value: self._taken(program, value, entry, copies, (), True) for value in unchanged}
        else:
            later = NOTHING if part in PIECES else program.later[part]
            kept = self.kept[name, stage, batch] if later or (name, stage, batch) in self.kept else {}
            copies = copies and bool(self.boxes["copies", stage])
            held, direct = self.held, {} if copies else program.direct
            boxed = []
            for value in function.takes:
                if value in kept:
                    boxed.append(kept[value] if value in later else kept.pop(value))
                elif (given := held.get(direct.get(value, ""))) is not None:  # most values, in few steps
                    boxed.append(given)
                else:
                    boxed.append(self._taken(program, value, entry, copies, empties, value in later))
            gives = function.gives
            made = dict(zip(gives, (yield from function(boxed, where)), strict=True))
            kept.update((value, made[value]) for value in gives if value in later)
        for of, value in results.states.items():
            if value in made:
                self._next(program, of, made[value], stage, batch)
        for label, value in results.returned.items():
            if value in made:
                self._return(label, made[value], stage, batch, received)
        return made

    def _taken(self, program: RankProgram, of: str, entry: Entry, copies: bool, empties: Collection[str],
               later: bool) -> torch.Tensor:  # fmt: skip
        """Return a value that a part takes; if nothing takes it later, nothing here keeps it alive.

        Args:
            later: whether a later part of the program takes it.
        """
        if of in program.constants:
            return program.constants[of]
        group, name, batch = program.groups[of], program.names[of], entry.batch
        stage = program.stages.get(of) if entry.stage is None else entry.stage
        empties = () if later else empties
        if copies and (copy := program.copies.get(of)) is not None and copy in self.boxes["copies", stage]:
            return _from(self.boxes["copies", stage], copy, "copies" in empties)
        if group == INPUT:
            own = self.inputs[stage][batch] if batch is not None else {}
            if name in self.batches:
                return _from(self.batches, name, "batches" in empties)
            return _from(own, name, INPUT in empties) if name in own else self.held[name]
        if group == HELD and name in self.held:
            return self.held[name]
        if group in (HELD, "sums"):  # a sum whose parameter the program does not have is not known as one
            box = self.boxes["sums", stage]
            if name not in box and of in program.sums:
                box[name] = program.zeros(of, self.device)
            return _from(box, name, not later)
        if group == "outputs":
            return self._stacked(name, stage)
        box = self.boxes[group, None if group in OF_ALL else stage]
        return _from(box, of if group == "started" and of in box else name, group in empties)

    def _next(self, program: RankProgram, of: str, value: torch.Tensor, stage: int | None, batch: int | None) -> None:
        """Keep the next value of a state: in the box of its word, or in the memory of what stays between steps."""
        group, name = program.groups[of], program.names[of]
        stage = program.stages.get(of) if stage is None else stage
        if group not in (HELD, INPUT):
            self.boxes[group, None if group in OF_ALL else stage][of if group == "started" else name] = value
        elif value is not self.held[name]:
            if batch is None:
                self.written[name] = value  # the program may read it yet
            else:
                self.held[name].copy_(value)

    def _stacked(self, name: str, stage: int | None) -> torch.Tensor:
        """Return an output of all micro-batches, which the stage has made."""
        label = output_name(name.removeprefix(STACKED))
        return torch.stack([self.outputs[stage, k].pop(label) for k in range(len(self.inputs[stage]))])

    def _return(self, label: str, value: torch.Tensor, stage: int | None, batch: int | None,
                received: Collection[int] | None) -> None:  # fmt: skip
        if label.startswith(STACKED):
            for k, piece in enumerate(value.unbind(0)):
                self.outputs[None, k][output_name(label.removeprefix(STACKED))] = piece
        elif label.startswith(output_name("")):
            self.outputs[stage, batch][label] = value if received is None else _apart(value, received)
        elif label.startswith(".count."):
            self.boxes["counts", None][label] = value
        elif label.startswith(".total."):
            totals = self.boxes["totals", None]
            totals[label] = totals[label] + value if label in totals else value
        else:
            self.returned[label] = value


def _from(box: Tensors, name: str, is_last: bool) -> torch.Tensor:
    return box.pop(name) if is_last else box[name]


def _apart(value: torch.Tensor, received: Collection[int]) -> torch.Tensor:
    """Return a value in memory of its own: not in that of a message, nor as a part of a larger value."""
    memory = value.untyped_storage()
    shares = memory.data_ptr() in received or memory.nbytes() > value.nbytes
    return value.clone() if shares else value
