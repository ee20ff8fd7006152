"""List the programs that one rank of a pipelined step runs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.program import Program
from autopar.step.pipelined.placing.programs import PipelinedMicro, Stage
from autopar.step.pipelined.placing.update import PipelinedUpdate


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


def rank_step_of(micro: PipelinedMicro, update: PipelinedUpdate, rank: int) -> PipelinedRankStep:
    """Return the programs that a rank runs."""
    programs: dict[str, Program] = {"micro": micro.local[rank]}
    for stage, ending in zip(micro.stages, update.stages, strict=True):
        if rank in stage.mesh:
            programs |= _of_stage(stage, rank)
            if ending.placed is not None:
                programs[f"stage {stage.number} update"] = ending.placed[1][rank]
    return PipelinedRankStep(rank, programs)


def _of_stage(stage: Stage, rank: int) -> dict[str, Program]:
    at = f"stage {stage.number}"
    programs = {f"{at} copy": stage.micro.copy[1][rank]} if stage.micro.copy is not None else {}
    if stage.counting is not None:
        programs |= {f"{at} sums": stage.counting.sums[1][rank], f"{at} count": stage.counting.counts[1][rank]}
    return programs
