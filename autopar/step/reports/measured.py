"""Measure the profile of a captured training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autopar.costs.machine import Machine, machine_from
from autopar.costs.profile import Profile
from autopar.model.calls import Calls
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.measuring.between_stages import BetweenStages
from autopar.runtime.measuring.clock import Effort
from autopar.runtime.measuring.measure import Placed, measure
from autopar.step.compiling.compiled_step import MicroBatch, StepUpdate


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
    programs: Mapping[str, Placed],
    machine: Machine | str | Path | None,
    effort: Effort | None,
    interference: bool,
    between: Callable[[Machine], Sequence[BetweenStages]] = lambda machine: (),
) -> Profile:
    """Measure the programs of a step. Other arguments, and errors, are those of ``TrainStep.measure``.

    Args:
        programs: by name.
        between: returns the messages between stages, with their prices on a machine.
    """
    priced = calls.compiler.planner.machine if machine is None else machine_from(machine)
    return measure(
        programs, priced, calls.device, calls.job, effort=effort, interference=interference, between=between(priced)
    )
