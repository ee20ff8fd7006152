"""Read a plan as a user gives it: plans that were searched before stand beside ``"search"``, and files are read.

A searched plan decides all layouts. Entries after it in a list are constraints: where they want other layouts than the
plan, parameters keep those of the plan, and all else is searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.costs.machine import Machine
from autopar.errors import PlanError, shown
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.plan.plan import SEARCH, Plan
from autopar.plan.presets import PRESETS
from autopar.plan.spec import Spec
from autopar.search.devices.stages import Pipelined
from autopar.search.solutions.artifact import load
from autopar.search.solutions.solution import Solution

Entry = Mapping[str, Spec] | str | Path | Solution | Pipelined
GivenPlan = Plan | Solution | Pipelined | Path | Sequence[Entry]


def without_pipeline(plan: GivenPlan | None, mesh: Mesh) -> tuple[GivenPlan | None, Pipelined | None]:
    """Return a plan without the pipeline that it has, as ``best_pipeline`` has chosen it.

    Raises:
        PlanError: it has several, or one for another number of ranks along ``pp``.
    """
    in_list = isinstance(plan, (list, tuple))
    entries = list(plan) if in_list else [plan]  # type: ignore[arg-type]
    chosen = [entry for entry in entries if isinstance(entry, Pipelined)]
    if not chosen:
        return plan, None
    if len(chosen) > 1:
        raise PlanError(f"a plan has one pipeline, and here are {len(chosen)}; give one of them")
    (pipelined,) = chosen
    if (ranks := mesh.sizes.get(PIPELINE, 1)) != pipelined.schedule.ranks:
        raise PlanError(
            f"the pipeline is for pp={pipelined.schedule.ranks}, and the mesh ({mesh}) has pp={ranks}; choose one for "
            f"it"
        )
    others = [entry for entry in entries if entry is not pipelined]
    return (others if others else None), pipelined  # type: ignore[return-value]


def given_plan(plan: GivenPlan | None, mesh: Mesh) -> tuple[Plan | None, Solution | None]:
    """Return a plan without searched ones, and the searched plan that it has.

    Args:
        plan: a plan; a searched plan, or the path of its file; or a list with one of these. A text is a path if it is
            no name of a plan, and it ends with ``.json`` or there is such a file.

    Raises:
        PlanError: there are several searched plans, one is of another mesh, or entries stand before it.
        FileNotFoundError: there is no such file.
    """
    in_list = isinstance(plan, (list, tuple))
    entries = [_read(entry) for entry in (plan if in_list else [plan])]  # type: ignore[union-attr]
    searched = [entry for entry in entries if isinstance(entry, Solution)]
    if not searched:
        return plan, None  # type: ignore[return-value]
    if len(searched) > 1:
        some = ", ".join(each.source or "a solution" for each in searched)
        raise PlanError(f"a searched plan decides all layouts, and here are {len(searched)}: {some}; give one of them")
    (given,) = searched
    name = given.source or "the searched plan"
    at = next(k for k, entry in enumerate(entries) if entry is given)
    if before := [entry for entry in entries[:at] if entry != SEARCH]:
        raise PlanError(
            f"{shown(before[0])} stands before {name}, which decides all layouts; put it after the plan, where it is a "
            f"constraint, or leave it out"
        )
    check_mesh(given, mesh)
    after = [entry for entry in entries[at + 1 :] if entry != SEARCH]
    return [SEARCH, *after] if after else SEARCH, given  # type: ignore[list-item]


def check_mesh(given: Solution, mesh: Mesh) -> None:
    """Raise ``PlanError`` if a searched plan is for another mesh."""
    if given.mesh.axes != mesh.axes:
        name = f"{given.source}: " if given.source else ""
        raise PlanError(
            f"{name}the plan is for the mesh ({given.mesh}), and this one is ({mesh}); search a plan for it"
        )


def about_machine(given: Solution, machine: Machine | None) -> list[str]:
    """Say that a searched plan brings its machine, where the user names none."""
    if machine is not None:
        return []
    return [f"prices are those of the plan's machine, {given.machine.name}; machine= prices the plan on another"]


def _read(entry: object) -> object:
    """Return an entry of a plan, or the searched plan in the file that it names."""
    if isinstance(entry, Path) or (isinstance(entry, str) and _is_path(entry)):
        return load(entry)
    return entry


def _is_path(text: str) -> bool:
    if text == SEARCH or text in PRESETS:
        return False
    try:
        return text.endswith(".json") or Path(text).is_file()
    except (OSError, ValueError):  # a text that can be no path
        return False
