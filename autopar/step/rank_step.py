"""Hold, print and parse the scheduled programs that one rank runs in a step, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import TextError
from autopar.ir.program import Program
from autopar.notebook import ProgramInNotebook
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate
from autopar.step.reports.communication import running

NAMES = ("copy", "first", "inner", "last", "turn")


@dataclass(frozen=True)
class RankStep(ProgramInNotebook):
    """The programs that one rank runs in a step.

    Attributes:
        microbatches: the number of micro-batches.
        programs: name → program. ``copy`` makes low-precision copies of parameters. ``first`` is the first micro-batch
            with the counts of all, ``inner`` runs for each of the others but the last, and ``last`` is the last
            micro-batch joined with the update. A program that a step does not need is left out.

    Where anything crosses the end of a step, ``turn`` replaces ``first`` and ``last``. Its phase ``finish`` completes
    the step before. The first step runs the other phases, and ``step.finish()`` runs ``finish`` alone. Of several
    micro-batches, the first runs ``turn`` up to its backward, and the last runs its forward, backward and update, and
    starts the collectives that cross; ``inner`` runs between them. ``copy`` runs in the first step alone.
    """

    microbatches: int
    programs: Mapping[str, Program]

    def __getitem__(self, name: str) -> Program:
        """Return a program by its name."""
        return self.programs[name]

    def __str__(self) -> str:
        return self.text()

    def text(self, *, comments: bool = False) -> str:
        """Return a header, and the text of each program after its name; ``comments`` as of ``Program.text``."""
        parts = [f"{name} {program.text(comments=comments)}" for name, program in self.programs.items()]
        return "\n".join([f"step of {self.microbatches} micro-batches", *parts])

    @staticmethod
    def parse(text: str) -> RankStep:
        """Return the step that prints as ``text``; ``TextError`` names the line at fault."""
        head, *lines = text.splitlines() or [""]
        words = head.split()
        if len(words) != 4 or words[:2] != ["step", "of"] or not words[2].isdecimal() or words[3] != "micro-batches":
            raise TextError(f"line 1: the header of a step is 'step of 2 micro-batches'\n    {head}")
        sections: dict[str, list[str]] = {}
        name = ""
        for number, line in enumerate(lines, 2):
            first, _, header = line.partition(" ")
            if first in NAMES and header.startswith("program "):
                if first in sections:
                    raise TextError(f"line {number}: the step has {first} twice\n    {line}")
                name, line = first, header
                sections[name] = [""] * (number - 1)
            if not name:
                raise TextError(f"line {number}: a program begins with its name, one of {', '.join(NAMES)}\n    {line}")
            sections[name].append(line)
        if not sections.keys() & {"last", "turn"}:
            raise TextError(f"line {len(lines) + 1}: the step ends without its program last")
        return RankStep(int(words[2]), {name: Program.parse("\n".join(part)) for name, part in sections.items()})

    def verify(self) -> None:
        """Check each program; ``VerifyError`` otherwise."""
        for program in self.programs.values():
            program.verify()


def rank_step_of(micro: MicroBatch, update: StepUpdate, microbatches: int, rank: int) -> RankStep:
    """Return the programs that one rank runs."""
    programs = running(micro, update, microbatches)
    if update.crossing and microbatches <= 2:
        programs.pop("inner", None)  # ``turn`` runs for both
    return RankStep(microbatches, {name: local[rank] for name, (local, _) in programs.items()})
