"""Print the programs of a pipelined step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.program import Program
from autopar.notebook import ProgramInNotebook
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage
from autopar.step.pipelined.placing.update import PipelinedUpdate, StageUpdate


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
    update: PipelinedUpdate

    @property
    def microbatches(self) -> int:
        return self.micro.schedule.batches

    @property
    def stages(self) -> tuple[StagePrograms, ...]:
        """The programs of each stage, which has a price of its own."""
        pairs = zip(self.micro.stages, self.update.stages, strict=True)
        return tuple(StagePrograms(stage.number, dict(self._runs(stage, ending))) for stage, ending in pairs)

    @property
    def programs(self) -> dict[str, Program]:
        """The programs by name: ``micro`` has the passes of all stages, with the messages between them as lines.

        The others are of one stage: ``stage 0 copy``, ``stage 0 update``, ….
        """
        others = {
            f"stage {stage.number} {name}": program
            for stage in self.stages
            for name, program in stage.programs.items()
            if name != "micro"
        }
        return {"micro": self.micro.program, **others}

    def _runs(self, stage: Stage, ending: StageUpdate) -> Iterator[tuple[str, tuple[Program, int]]]:
        count = self.microbatches
        if stage.micro.copy is not None:
            yield "copy", (stage.micro.copy[0], 1)
        if stage.counting is not None:
            yield "sums", (stage.counting.sums[0], count)
            yield "count", (stage.counting.counts[0], 1)
        yield "micro", (stage.program, count)
        for sent in self.update.homeward:
            if sent.reader == stage.number:
                yield f"home {sent.tied.name}", (sent.placed[0], 1)
        if ending.placed is not None:
            yield "update", (ending.placed[0], 1)

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
