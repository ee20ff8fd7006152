"""Price plans of one model beside each other: a row for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.api import parallelize
from autopar.cli.train.optimizers import OPTIMIZERS
from autopar.costs.machine import Machine
from autopar.costs.program_price import price
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.parallel import Parallel
from autopar.plan.plan import Plan
from autopar.report.memory import memory_of
from autopar.report.passes import Reports
from autopar.report.transfers import bytes_per_axis
from autopar.search.solutions.solution import Solution
from autopar.step.train_step import TrainStep


@dataclass(frozen=True)
class Planning:
    """What is planned: a call of a model, or its training step, on a mesh of machines.

    Attributes:
        model, example: as ``parallelize`` takes them.
        mesh: the mesh.
        machine: the machine whose seconds are added up.
        memory: the most bytes that a rank may use in a searched plan; ``None``: the capacity of the machine.
        time_limit: seconds of a search.
        optimizer: of the training step; ``None``: a call, with its backward.
    """

    model: torch.nn.Module
    example: Any
    mesh: Mesh
    machine: Machine
    memory: float | None
    time_limit: float
    optimizer: str | None

    @property
    def limit(self) -> float | None:
        """The bytes that a rank may use, if there is a limit."""
        return self.memory if self.memory is not None else self.machine.capacity


@dataclass(frozen=True)
class PlanRow:
    """What one plan costs.

    Attributes:
        name: the name of the plan.
        nanoseconds: the price of the explicit programs of a step; ``None`` if the plan cannot be placed.
        received: bytes that the rank with the largest pieces receives in a step.
        memory: bytes of the first rank at the peak.
        fits: whether these are within the limit.
        solution: the plan with its certificate, if it was searched.
        reports: what the passes did.
        why: why the plan cannot be placed; "" if it can.
    """

    name: str
    nanoseconds: int | None = None
    received: int = 0
    memory: int = 0
    fits: bool = True
    solution: Solution | None = None
    reports: Reports | None = None
    why: str = ""


def row_of(name: str, plan: Plan | Solution, planning: Planning) -> PlanRow:
    """Place a plan, and price it. Nothing is computed.

    Raises:
        AutoparError, ValueError: the plan cannot be placed.
    """
    options: dict[str, Any] = {
        "machine": planning.machine, "memory": planning.memory, "time_limit": planning.time_limit,
    }  # fmt: skip
    planned: Parallel | TrainStep
    if planning.optimizer is None:
        planned = parallelize(planning.model, planning.mesh, plan, example=planning.example, **options)
        programs, memory = {"call": planned.program}, memory_of(planned.local(0)).peak
        nanoseconds = price(planned.program, planning.machine).nanoseconds
    else:
        parallel = parallelize(planning.model, planning.mesh, plan, **options)
        planned = parallel.train_step(OPTIMIZERS[planning.optimizer](parallel.parameters(), 1e-3, 0.0))
        planned.capture(planning.example)
        programs, memory = dict(planned.program.programs), planned.memory().peak
        nanoseconds = price(planned.program, planning.machine).nanoseconds
    received = sum(sum(bytes_per_axis(program).values()) for program in programs.values())
    fits = planning.limit is None or memory <= planning.limit
    return PlanRow(name, nanoseconds, received, memory, fits, planned.solution, planned.reports)


def rows_of(plans: Sequence[str], planning: Planning) -> list[PlanRow]:
    """Return a row for each plan; that of a plan that cannot be placed says why."""
    rows = []
    for name in plans:
        try:
            rows.append(row_of(name, name, planning))
        except (AutoparError, ValueError) as error:
            rows.append(PlanRow(name, why=str(error).partition("\n")[0]))
    return rows


def cheapest(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the cheapest of the plans that fit, the first one among equals; ``None`` if there is none."""
    priced = [row for row in rows if row.nanoseconds is not None and row.fits]
    return min(priced, key=lambda row: row.nanoseconds or 0, default=None)
