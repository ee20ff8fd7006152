"""List what is measured of a captured step on stages: the programs of all stages, and the messages between them."""

from __future__ import annotations

from autopar.costs.machine import Machine
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.measuring.between_stages import BetweenStages
from autopar.runtime.measuring.measure import Placed
from autopar.step.pipelined.placing.programs import PipelinedMicro
from autopar.step.pipelined.reports.times import PASSES, crossing_bytes, message_price, message_text
from autopar.step.program import Step


def placed_programs(step: Step) -> dict[str, Placed]:
    """Return the parts of all stages with their local programs, not scheduled, and how often each runs."""
    return {
        f"stage {number} {name}": Placed(program, LocalPrograms(program, lambda local: None), times)
        for number, part in enumerate(step.stages)
        for name, (program, times) in part.runs.items()
    }


def messages_of(micro: PipelinedMicro, machine: Machine) -> list[BetweenStages]:
    """Return the messages of each boundary and direction that has any."""
    found = []
    for boundary in range(len(micro.stages) - 1):
        for phase in PASSES:
            sends = crossing_bytes(micro, boundary, phase)
            if any(sends.values()):
                text, price = message_text(boundary, phase, sends), message_price(sends, machine)
                found.append(BetweenStages(text, price, {phase: micro.schedule.batches}, sends))
    return found
