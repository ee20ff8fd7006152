"""Hold the programs of a whole training step; print, parse and verify them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from autopar.errors import TextError, VerifyError
from autopar.ir.nodes import name_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.text.printer import print_type
from autopar.ir.value_names import copy_name
from autopar.notebook import ProgramInNotebook
from autopar.step.compiling.part_of_stage import part_of_stage
from autopar.step.reports.messages import RankMessages

if TYPE_CHECKING:
    from typing_extensions import Self

HEAD = re.compile(r"step of (\d+) micro-batches(?: in stages, (.+))?")


@dataclass(eq=False)
class NamedPrograms(ProgramInNotebook):
    """The programs of a step, of all ranks or of one. Prints as text, which ``parse`` reads.

    Attributes:
        microbatches: the number of micro-batches.
        programs: name → program, in the order in which they run.
        schedule: the name of the schedule of a pipeline; empty without stages.
    """

    NAMES: ClassVar[tuple[str, ...]] = ()  # that there may be; ``gather@0`` is the program gather of stage 0
    LAST: ClassVar[tuple[str, ...]] = ()  # of these there is one

    microbatches: int
    programs: Mapping[str, Program]
    schedule: str = ""

    def __getitem__(self, name: str) -> Program:
        """Return a program by its name, such as ``micro``. ``KeyError`` names those that there are."""
        if name not in self.programs:
            raise KeyError(f"no program {name!r}; there are {', '.join(self.programs)}")
        return self.programs[name]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return (self.microbatches, self.programs, self.schedule) == (
            other.microbatches, other.programs, other.schedule,
        )  # fmt: skip

    __hash__ = None  # type: ignore[assignment]  # its programs are mutable

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        programs = ", ".join(f"{name} {program!r}" for name, program in self.programs.items())
        return f"<{type(self).__name__} of {self.microbatches} micro-batches: {programs}>"

    def text(self, *, comments: bool = False) -> str:
        """Return a header, and the text of each program after its name.

        ``comments=True`` adds module paths and source lines.
        """
        parts = [f"{name} {program.text(comments=comments)}" for name, program in self.programs.items()]
        stages = f" in stages, {self.schedule}" if self.schedule else ""
        return "\n".join([f"step of {self.microbatches} micro-batches{stages}", *parts])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the step that prints as ``text``; ``TextError`` names the line and what is wrong with it."""
        head, *lines = text.splitlines() or [""]
        found = HEAD.fullmatch(head)
        if found is None:
            raise TextError(f"line 1: the header of a step is 'step of 2 micro-batches'\n    {head}")
        sections: dict[str, list[str]] = {}
        name = ""
        for number, line in enumerate(lines, 2):
            first, _, header = line.partition(" ")
            if first.partition("@")[0] in cls.NAMES and header.startswith("program "):
                if first in sections:
                    raise TextError(f"line {number}: the step has {first} twice\n    {line}")
                name, line = first, header
                sections[name] = [""] * (number - 1)
            if not name:
                raise TextError(
                    f"line {number}: a program begins with its name, one of {', '.join(cls.NAMES)}\n    {line}"
                )
            sections[name].append(line)
        if not sections.keys() & set(cls.LAST):
            raise TextError(f"line {len(lines) + 1}: the step ends without its program {cls.LAST[0]}")
        programs = {name: Program.parse("\n".join(part)) for name, part in sections.items()}
        return cls(int(found[1]), programs, found[2] or "")

    def verify(self) -> None:
        """Check each program; ``VerifyError`` otherwise."""
        for program in self.programs.values():
            program.verify()


class Step(NamedPrograms):
    """A training step: ``micro`` runs once for each micro-batch, ``update`` once.

    The programs hand values to each other by name (``ir.value_names``): the sums of gradients and losses are states of
    ``micro`` that begin as zeros, and the parameters are states of ``update``. ``count`` computes the counts that
    ``micro`` divides by, from the inputs of all micro-batches; ``copy`` makes the low-precision copies of parameters
    that ``micro`` takes in their place.

    On the stages of a pipeline, these are programs of all stages, and their messages are lines. There, ``sums`` makes
    the sums of one micro-batch for ``count``, ``copy`` also copies parameters to stages that do not keep them,
    ``gather@0`` gathers the parameters of stage 0, and ``share`` brings outputs and written buffers to all stages.
    """

    NAMES = ("count", "copy", "sums", "gather", "micro", "share", "update")
    LAST = ("update",)

    @property
    def micro(self) -> Program:
        return self.programs["micro"]

    @property
    def update(self) -> Program:
        return self.programs["update"]

    @property
    def runs(self) -> dict[str, tuple[Program, int]]:
        """The programs by name, and how often a step runs each."""
        often = ("micro", "sums")
        return {name: (made, self.microbatches if name in often else 1) for name, made in self.programs.items()}

    @property
    def parts(self) -> dict[str, tuple[Program, int]]:
        """The programs that have prices, by name, and how often a step runs each: with stages, those of each stage."""
        of_stages = {
            f"stage {number} {name}": run
            for number, stage in enumerate(self.stages)
            for name, run in stage.runs.items()
        }
        return of_stages or self.runs

    @cached_property
    def stages(self) -> tuple[Step, ...]:
        """The part of each stage, which has a price of its own; none without stages.

        What a stage receives is an input there, and what it sends is returned.
        """
        names = self.micro.stages
        own = {stage: f"gather@{number}" for number, stage in enumerate(names)}
        of_all = {name: program for name, program in self.programs.items() if "@" not in name}
        return tuple(
            Step(
                self.microbatches,
                {
                    **({"gather": self.programs[own[stage]]} if own[stage] in self.programs else {}),
                    **{name: part_of_stage(program, stage) for name, program in of_all.items()},
                },
            )
            for stage in names
        )

    def verify(self) -> None:
        """Check each program, and that they agree on the types of the values that they share; else ``VerifyError``."""
        super().verify()
        types = {
            key: {(name_of(node), (type := tensor_type(node)).mesh): type for node in program.placeholders}
            for key, program in self.programs.items()
        }
        copies, gathered = types.get("copy", {}), any("@" in name for name in self.programs)
        for (name, mesh), type in types["micro"].items() if not gathered else ():
            copy = copies.get((copy_name(name), mesh))
            key, other = ("copy", copy) if copy is not None else ("update", types["update"].get((name, mesh), type))
            if other != type:
                raise VerifyError(
                    f"micro and {key} disagree on {name}: {print_type(type)} in micro, {print_type(other)} in {key}"
                )


class RankStep(NamedPrograms):
    """The programs that one rank runs in a step.

    ``copy`` makes low-precision copies of parameters. ``first`` is the first micro-batch with the counts of all,
    ``inner`` runs for each of the others but the last, and ``last`` is the last micro-batch joined with the update. A
    program that a step does not need is left out.

    Where anything crosses the end of a step, ``turn`` replaces ``first`` and ``last``. Its phase ``finish`` completes
    the step before. The first step runs the other phases, and ``step.finish()`` runs ``finish`` alone. Of several
    micro-batches, the first runs ``turn`` up to its backward, and the last runs its forward, backward and update, and
    starts the collectives that cross; ``inner`` runs between them. ``copy`` runs in the first step alone.

    On the stages of a pipeline, a rank runs the programs of ``Step``, as far as they are of its stages.
    """

    NAMES = ("copy", "first", "inner", "last", "turn", *Step.NAMES)
    LAST = ("last", "turn", "update")

    @property
    def messages(self) -> RankMessages:
        """The messages between stages that the rank sends and receives: slot, peer, bytes. Prints as a table."""
        return RankMessages.of(self.programs)
