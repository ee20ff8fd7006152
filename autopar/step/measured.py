"""Measure the profile of a captured training step."""

from __future__ import annotations

from pathlib import Path

from autopar.costs.machine import Machine, machine_from
from autopar.costs.profile import Profile
from autopar.model.calls import Calls
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.measuring.clock import Effort
from autopar.runtime.measuring.measure import Placed, measure
from autopar.step.compiled_step import MicroBatch, StepUpdate


def placed_programs(micro: MicroBatch, update: StepUpdate, microbatches: int) -> dict[str, Placed]:
    """Return the explicit programs of a step with their local ones, not scheduled, and how often each runs, by name.

    ``first`` and ``last`` count 0 times: their calls are those of the programs that they are merged of.
    """
    programs = {
        "count": (micro.count and micro.count[0], 1), "copy": (micro.copy and micro.copy[0], 1),
        "micro": (micro.program, microbatches), "update": (update.program, 1),
        "first": (micro.first and micro.first[0], 0), "last": (update.last[0], 0),
    }  # fmt: skip
    return {
        name: Placed(program, LocalPrograms(program, lambda local: None), times)
        for name, (program, times) in programs.items()
        if program is not None
    }


def measured(
    calls: Calls,
    micro: MicroBatch,
    update: StepUpdate,
    microbatches: int,
    machine: Machine | str | Path | None,
    effort: Effort | None,
    interference: bool,
) -> Profile:
    """Measure the step on the device of this process. Arguments and errors are those of ``TrainStep.measure``."""
    priced = calls.compiler.planner.machine if machine is None else machine_from(machine)
    programs = placed_programs(micro, update, microbatches)
    return measure(programs, priced, calls.device, calls.job, effort=effort, interference=interference)
