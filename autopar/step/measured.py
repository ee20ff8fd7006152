"""Measure the profile of a captured training step."""

from __future__ import annotations

from pathlib import Path

from autopar.costs.machine import Machine, machine_from
from autopar.costs.profile import Profile
from autopar.model.calls import Calls
from autopar.runtime.measuring.clock import Effort
from autopar.runtime.measuring.measure import Placed, measure
from autopar.step.compiled_step import MicroBatch, StepUpdate


def placed_programs(micro: MicroBatch, update: StepUpdate, microbatches: int) -> dict[str, Placed]:
    """Return the explicit programs of a step with their local ones, and how often each runs, by name.

    ``first`` and ``last`` are merged of others, whose calls they have.
    """
    pairs = {
        "count": (micro.count, 1), "copy": (micro.copy, 1), "micro": ((micro.program, micro.local), microbatches),
        "update": ((update.program, update.local), 1), "first": (micro.first, 0), "last": (update.last, 0),
    }  # fmt: skip
    return {name: Placed(*pair, times) for name, (pair, times) in pairs.items() if pair is not None}


def measured(
    calls: Calls,
    micro: MicroBatch,
    update: StepUpdate,
    microbatches: int,
    machine: Machine | str | Path | None,
    effort: Effort | None,
    interference: bool,
) -> Profile:
    """Measure the step on the device of this process; see ``TrainStep.measure``."""
    priced = calls.compiler.planner.machine if machine is None else machine_from(machine)
    programs = placed_programs(micro, update, microbatches)
    return measure(programs, priced, calls.device, calls.job, effort=effort, interference=interference)
