"""Print the programs of a pipelined step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.mesh import stage_name
from autopar.ir.program import Program
from autopar.notebook import ProgramInNotebook
from autopar.step.compiling.compiled_step import Placed, StepUpdate
from autopar.step.pipelined.placing.part import part_of_stage
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage


def of_all_stages(micro: PipelinedMicro, update: StepUpdate) -> dict[str, Placed]:
    """Return the programs of all stages that a step runs, by name, in their order."""
    before = {name: placed for name, placed in micro.around.items() if name != "share"}
    behind = {name: placed for name, placed in micro.around.items() if name == "share"}
    return {**before, "micro": (micro.program, micro.local), **behind, "update": update.last}


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
        """The programs by name: those of all stages, with their messages; ``stage 0 gather`` is of one stage."""
        gathers = {
            f"stage {stage.number} gather": stage.micro.copy[0]
            for stage in self.micro.stages
            if stage.micro.copy is not None
        }
        return {**gathers, **{name: program for name, (program, _) in of_all_stages(self.micro, self.update).items()}}

    def _runs(self, stage: Stage) -> Iterator[tuple[str, tuple[Program, int]]]:
        """Yield what a stage runs: the name, the program, and how often."""
        if stage.micro.copy is not None:
            yield "gather", (stage.micro.copy[0], 1)
        for name, (program, _) in of_all_stages(self.micro, self.update).items():
            own = stage.program if name == "micro" else part_of_stage(program, stage_name(stage.number))
            yield name, (own, self.microbatches if name in ("micro", "sums") else 1)

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
