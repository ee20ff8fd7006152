"""Measure the profile of a captured training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autopar.costs.machine import Machine, machine_from
from autopar.costs.profile import Profile
from autopar.ir.program import Program
from autopar.model.calls import Calls
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.measuring.between_stages import BetweenStages
from autopar.runtime.measuring.clock import Effort
from autopar.runtime.measuring.measure import Placed, measure
from autopar.step.program import Step


def placed_programs(step: Step, merged: Mapping[str, Program]) -> dict[str, Placed]:
    """Return the explicit programs of a step with their local ones, not scheduled, and how often each runs, by name.

    Args:
        merged: the programs that run in the place of several of them. They count 0 times.
    """
    programs = {**step.parts, **{name: (program, 0) for name, program in merged.items()}}
    return {
        name: Placed(program, LocalPrograms(program, lambda local: None), times)
        for name, (program, times) in programs.items()
    }


def measured(
    calls: Calls,
    programs: Mapping[str, Placed],
    between: Callable[[Machine], Sequence[BetweenStages]],
    machine: Machine | str | Path | None,
    effort: Effort | None,
    interference: bool,
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
