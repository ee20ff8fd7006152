"""List the programs that one rank of a pipelined step runs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.program import Program
from autopar.step.compiling.compiled_step import StepUpdate
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.step import of_all_stages


@dataclass(frozen=True)
class PipelinedRankStep:
    """The programs that one rank of a pipelined step runs. Prints as text.

    Attributes:
        rank: the rank.
        programs: the programs by name. ``micro`` has the passes of its stages, and the messages between stages.
    """

    rank: int
    programs: dict[str, Program]

    def __getitem__(self, name: str) -> Program:
        """Return a program by its name, such as ``micro``."""
        return self.programs[name]

    def __str__(self) -> str:
        parts = [f"{name} {program.text()}" for name, program in self.programs.items()]
        return "\n".join([f"rank {self.rank} of a pipelined step", *parts])

    def verify(self) -> None:
        """Check each program; ``VerifyError`` otherwise."""
        for program in self.programs.values():
            program.verify()


def rank_step_of(micro: PipelinedMicro, update: StepUpdate, rank: int) -> PipelinedRankStep:
    """Return the programs that a rank runs."""
    gathers = {
        f"stage {stage.number} gather": stage.micro.copy[1][rank]
        for stage in micro.stages
        if stage.micro.copy is not None and rank in stage.mesh
    }
    of_all = {name: local[rank] for name, (_, local) in of_all_stages(micro, update).items()}
    return PipelinedRankStep(rank, {**gathers, **of_all})
