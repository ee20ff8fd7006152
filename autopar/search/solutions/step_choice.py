"""Hold what was chosen beside the layouts of a training step: micro-batches, recomputation and ZeRO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Column, Table

from autopar.errors import shown
from autopar.notebook import InNotebook, printed
from autopar.search.certificate import bytes_text

TAKEN, DEARER, TOO_LARGE, LATE = "taken", "no plan is cheaper", "does not fit", "not searched: the time limit"
Way = str | tuple[str, ...] | None  # of recomputation


@dataclass(frozen=True)
class Candidate:
    """One way to run a step.

    Attributes:
        microbatches, recompute, zero: options of ``train_step``.
        nanoseconds: the price of the cheapest plan that was found, on stages its simulated time; ``None`` if none was.
        least: a lower bound of the prices of its plans, in nanoseconds; 0 if none is known, ``inf`` if it has no plan.
        bytes: what a rank uses at the peak, by ``step.memory()``; ``None`` if it is not known.
        note: ``taken``, or why it was not.
    """

    microbatches: int
    recompute: Way = None
    zero: int | str = 0
    nanoseconds: int | None = None
    least: float = 0.0
    bytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class StepChoice(InNotebook):
    """How a step runs. Prints as a table of its candidates.

    Attributes:
        microbatches, recompute: options of ``train_step``, as they were given or chosen.
        zero: the stage of ZeRO that was given or chosen; ``"search"``: that of each parameter was chosen beside its
            layouts.
        stages: trained parameter → its stage: 1 if its state is split further than its home, 2 if the sum of its
            gradients has the layout of the state, too, 3 if its uses gather it.
        candidates: what was compared; empty if nothing was open.
    """

    microbatches: int = 1
    recompute: Way = None
    zero: int | str = 0
    stages: Mapping[str, int] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        right = [Column(header, justify="right") for header in ("ms a step", "bound", "peak")]
        table = Table("microbatches", "recompute", "zero", *right, "")
        for row in self.candidates:
            ms = "" if row.nanoseconds is None else f"{row.nanoseconds / 1e6:,.3f}"
            least = f"{row.least / 1e6:,.3f}" if 0 < row.least < math.inf else ""
            peak = "" if row.bytes is None else bytes_text(row.bytes)
            table.add_row(str(row.microbatches), _way(row.recompute), str(row.zero), ms, least, peak, row.note)
        return printed(table)

    def to_json(self) -> dict[str, Any]:
        """Return the choice as JSON."""
        rows = [{**asdict(row), "least": row.least if math.isfinite(row.least) else None} for row in self.candidates]
        return {**asdict(self), "stages": dict(self.stages), "candidates": rows}


def choice_from(content: Any) -> StepChoice:
    """Read a choice from JSON. ``ValueError`` if a field is missing or wrong."""
    try:
        rows = tuple(_candidate(row) for row in content["candidates"])
        choice = StepChoice(**{**content, "recompute": _read(content["recompute"]), "candidates": rows})
        right = _is_right(choice) and all(map(_is_right, rows))
        right &= all(isinstance(stage, int) for stage in choice.stages.values())
        wrong = "" if right else "a number or a name is wanted"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"step: {shown(content)} is no choice of options of a step: {wrong}")
    return choice


def _candidate(row: Any) -> Candidate:
    least = math.inf if row["least"] is None else float(row["least"])
    return Candidate(**{**row, "recompute": _read(row["recompute"]), "least": least})


def _is_right(row: StepChoice | Candidate) -> bool:
    """Return whether numbers are whole ones from 0 on, and ways to recompute are names."""
    whole: list[object] = [row.microbatches] if row.zero == "search" else [row.microbatches, row.zero]
    if isinstance(row, Candidate):
        whole += [value for value in (row.nanoseconds, row.bytes) if value is not None]
    names = [row.recompute] if isinstance(row.recompute, str) else row.recompute or []
    numbers = all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in whole)
    return numbers and all(isinstance(name, str) for name in names)


def _read(way: Any) -> Way:
    return tuple(way) if isinstance(way, list) else way


def _way(way: Way) -> str:
    return "none" if way is None else way if isinstance(way, str) else ", ".join(way)
