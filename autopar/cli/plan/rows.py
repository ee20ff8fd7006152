"""Price plans of one model beside each other: a row for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cli.plan.planning import Planned, Planning
from autopar.errors import AutoparError
from autopar.ir.transfers import TRANSFERS
from autopar.page.subject import Alternative
from autopar.plan.plan import Plan
from autopar.report.passes import Reports
from autopar.report.progress import doing
from autopar.search.solutions.solution import Solution
from autopar.step.pipelined.solution import PipelinedSolution


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
        note: that the preset adds nothing to the one that it extends; "" otherwise.
        why: why the plan cannot be placed; "" if it can.
        planned: the model on its mesh; ``None`` where it is not needed any more.
        found: its figures.
        runs: what is planned: ``a call`` or ``a step``.
    """

    name: str
    nanoseconds: int | None = None
    received: int = 0
    memory: int = 0
    fits: bool = True
    solution: Solution | None = None
    reports: Reports | None = None
    why: str = ""
    planned: Planned | None = None
    found: Mapping[str, Any] = field(default_factory=dict)
    runs: str = "a step"
    note: str = ""

    def to_json(self) -> Mapping[str, Any]:
        """Return the row as JSON, in seconds and bytes."""
        seconds = None if self.nanoseconds is None else self.nanoseconds / 1e9
        row = {"plan": self.name, "seconds": seconds, "received": self.received, "memory": self.memory}
        return row | ({"why": self.why} if self.why else {"fits": self.fits})

    def alternative(self) -> Alternative:
        """Return the row as the page of another plan shows it."""
        if self.nanoseconds is None:
            return Alternative(self.name, None, note=self.why)
        return Alternative(self.name, self.nanoseconds / 1e9, self.memory, self.note if self.fits else "does not fit")


def row_of(name: str, plan: Plan | Solution, planning: Planning) -> PlanRow:
    """Place a plan, and price it. Nothing is computed.

    Raises:
        AutoparError, ValueError: the plan cannot be placed.
    """
    planned = planning.placed(plan)
    with doing(f"price {name}"):
        found = planned.figures(planning.machine)
    solution = planned.solution
    assert not isinstance(solution, PipelinedSolution)  # the command refuses stages
    received = sum(row["bytes"] for row in found["transfers"] if TRANSFERS[row["transfer"]].collective)
    fits = planning.limit is None or found["memory"] <= planning.limit
    return PlanRow(
        name, round(found["seconds"] * 1e9), received, found["memory"], fits, solution, planned.reports,
        planned=planned, found=found, runs=planning.runs,
    )  # fmt: skip


def rows_of(plans: Sequence[str], planning: Planning) -> list[PlanRow]:
    """Return a row for each plan; that of a plan that cannot be placed says why.

    Only the cheapest and the searched ones keep their programs, which take memory here.
    """
    rows: list[PlanRow] = []
    for name in plans:
        try:
            with doing(f"plan {name}"):
                rows.append(_beside(row_of(name, name, planning), rows))
        except (AutoparError, ValueError) as error:
            rows.append(PlanRow(name, runs=planning.runs, why=str(error).partition("\n")[0]))
        best = cheapest(rows)
        rows = [row if row is best or row.solution is not None else replace(row, planned=None) for row in rows]
    return rows


def _beside(row: PlanRow, rows: Sequence[PlanRow]) -> PlanRow:
    """Return the row of a preset with a note where it has found nothing to add to the one that it extends."""
    base = next((each for each in rows if row.name.startswith(f"{each.name}+")), None)
    parts = ("seconds", "memory", "transfers", "modules")
    if base is None or base.nanoseconds is None or any(base.found[part] != row.found[part] for part in parts):
        return row
    return replace(row, note=f"as {base.name}: it found nothing to add")


def cheapest(rows: Sequence[PlanRow]) -> PlanRow | None:
    """Return the cheapest of the plans that fit, the first one among equals; ``None`` if there is none."""
    priced = [row for row in rows if row.nanoseconds is not None and row.fits]
    return min(priced, key=lambda row: row.nanoseconds or 0, default=None)
