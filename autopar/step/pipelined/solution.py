"""Hold the searched plans of the stages of a step, with their certificates; it prints as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table

from autopar.notebook import InNotebook, printed, right
from autopar.search.solutions.solution import Solution
from autopar.search.solutions.step_choice import StepChoice


@dataclass(frozen=True)
class PipelinedSolution(InNotebook):
    """The plans of the stages of a step, each searched by itself, and the time of the step. Prints as a table.

    A certificate is about one stage: its ops and transfers in a step, one after the other. How stages wait for each
    other is simulated, and has no bound.

    Attributes:
        stages: the plan of each stage.
        schedule: the schedule, in words.
        seconds: the simulated time of a step.
        step: how the step runs, and what was compared.
    """

    stages: tuple[Solution, ...]
    schedule: str
    seconds: float
    step: StepChoice = field(repr=False)

    @property
    def exact(self) -> bool:
        """Whether no stage has a cheaper plan; if some layouts were given, no plan that has them."""
        return all(stage.exact for stage in self.stages)

    @property
    def certificate(self) -> str:
        """The simulated time, and how much cheaper the plan of a stage could be at most, in a sentence."""
        loosest = max(range(len(self.stages)), key=lambda k: self.stages[k].gap)
        stage = self.stages[loosest]
        searched = sum(each.search_seconds for each in self.stages)
        proof = f"of each stage {stage.proof}" if self.exact else f"of stage {loosest} {stage.proof}"
        why = f"; {stage.reason}" * (not stage.exact and bool(stage.reason))
        return (
            f"searched in {searched:.1f} s: {self.seconds * 1e3:,.3f} ms a step on {stage.machine.name}, simulated "
            f"with {self.schedule}, and {proof}{why}"
        )

    def __str__(self) -> str:
        table = Table(right("stage"), right("ms in a step"), right("bound"), "")
        for number, stage in enumerate(self.stages):
            table.add_row(str(number), f"{stage.nanoseconds / 1e6:,.3f}", f"{stage.least / 1e6:,.3f}", stage.proof)
        choice = str(self.step) if self.step.candidates else ""
        return f"{printed(table)}{choice}{self.certificate}\n"
