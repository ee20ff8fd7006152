"""Print the programs of a pipelined step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.mesh import stage_name
from autopar.ir.program import Program
from autopar.notebook import ProgramInNotebook
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.pipelined.placing.part import part_of_stage
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage


@dataclass(frozen=True)
class StagePrograms(ProgramInNotebook):
    """The explicit programs of one stage of a step. Prints as text.

    Attributes:
        number: the number of the stage.
        runs: name → program, and how often a step runs it.
    """

    number: int
    runs: Mapping[str, tuple[Program, int]]

    @property
    def programs(self) -> dict[str, Program]:
        """The programs by name: ``micro``, ``update``, …."""
        return {name: program for name, (program, _) in self.runs.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name} {program.text()}" for name, program in self.programs.items())


@dataclass(frozen=True)
class PipelinedPrograms(ProgramInNotebook):
    """The explicit programs of a pipelined step. Prints as text, stage by stage.

    Attributes:
        micro: those of a micro-batch.
        update: those that end the step.
    """

    micro: PipelinedMicro
    update: StepUpdate

    @property
    def microbatches(self) -> int:
        return self.micro.schedule.batches

    @cached_property
    def stages(self) -> tuple[StagePrograms, ...]:
        """The part of each stage, which has a price of its own. What it receives is an input there."""
        return tuple(StagePrograms(stage.number, dict(self._runs(stage))) for stage in self.micro.stages)

    @property
    def programs(self) -> dict[str, Program]:
        """The programs by name: ``copy``, ``micro``, ``share`` and ``update`` are of all stages, with their messages.

        The others are of one stage: ``stage 0 sums``, ….
        """
        micro = self.micro
        of_all = {"copy": micro.copy and micro.copy[0], "micro": micro.program, "share": micro.share and micro.share[0]}
        own = {
            f"stage {stage.number} {name}": placed[0]
            for stage in micro.stages
            for name, placed in stage.own_programs.items()
        }
        found = {name: program for name, program in of_all.items() if program is not None}
        return {**own, **found, "update": self.update.program}

    def _runs(self, stage: Stage) -> Iterator[tuple[str, tuple[Program, int]]]:
        """Yield what a stage runs: the name, the program, and how often."""
        count, name = self.microbatches, stage_name(stage.number)
        of_all = {"copy": self.micro.copy, "share": self.micro.share, "update": self.update.last}
        parts = {key: part_of_stage(placed[0], name) for key, placed in of_all.items() if placed is not None}
        if "copy" in parts:
            yield "copy", (parts["copy"], 1)
        for key, (program, _) in stage.own_programs.items():
            yield key, (program, count if key == "sums" else 1)
        yield "micro", (stage.program, count)
        for key in ("share", "update"):
            if key in parts:
                yield key, (parts[key], 1)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, comments: bool = False) -> str:
        """Return a header, and the text of each program behind its name; ``comments`` as of ``Program.text``."""
        parts = [f"{name} {program.text(comments=comments)}" for name, program in self.programs.items()]
        head = (
            f"step of {self.microbatches} micro-batches in {len(self.micro.stages)} stages, {self.micro.schedule.name}"
        )
        return "\n".join([head, *parts])

    def verify(self) -> None:
        """Check each program; ``VerifyError`` otherwise."""
        for program in self.programs.values():
            program.verify()
