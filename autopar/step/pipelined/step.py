"""Print the programs of a pipelined step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.program import Program
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.placing.update import PipelinedUpdate


@dataclass(frozen=True)
class PipelinedPrograms:
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
    def programs(self) -> dict[str, Program]:
        """The programs by name, in the order of the stages."""
        return dict(self._named())

    @property
    def runs(self) -> dict[str, tuple[Program, int]]:
        """The programs by name, and how often a step runs each of them."""
        each = (" micro", " sums")  # once for each micro-batch
        return {name: (made, self.microbatches if name.endswith(each) else 1) for name, made in self._named()}

    def _named(self) -> Iterator[tuple[str, Program]]:
        for stage, ending in zip(self.micro.stages, self.update.stages, strict=True):
            at = f"stage {stage.number}"
            if stage.micro.copy is not None:
                yield f"{at} copy", stage.micro.copy[0]
            if stage.counting is not None:
                yield f"{at} sums", stage.counting.sums[0]
                yield f"{at} count", stage.counting.counts[0]
            yield f"{at} micro", stage.program
            for sent in self.update.homeward:
                if sent.reader == stage.number:
                    yield f"{at} home {sent.tied.name}", sent.placed[0]
            if ending.placed is not None:
                yield f"{at} update", ending.placed[0]

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
