"""Run ``autopar plan``: find the cheapest plan of a model and print it, or compare it with all presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from autopar.api import split_example
from autopar.capture.arguments import bind_arguments
from autopar.cli.files import check_writable
from autopar.cli.output import Output, output_of
from autopar.cli.plan.options import PlanOptions
from autopar.cli.plan.planning import Planning, planning_of
from autopar.cli.plan.rows import PlanRow, cheapest, row_of, rows_of
from autopar.cli.plan.show import show_machine, show_notes, show_plan, show_request, show_rows
from autopar.cli.status import DONE, status_of
from autopar.cli.train.refused import Refused
from autopar.ir.mesh import Mesh
from autopar.plan.plan import SEARCH
from autopar.plan.presets import PRESETS
from autopar.report.progress import doing
from autopar.search.certificate import bytes_text
from autopar.search.solutions.again import no_value
from autopar.search.solutions.artifact import load
from autopar.search.solutions.solution import Solution
from autopar.search.solutions.tables import Explanation


def run(options: PlanOptions) -> int:
    """Run with the options and return the exit status. An error is printed as one line, without a traceback."""
    return status_of(partial(_follow, options), options.model)


def _follow(options: PlanOptions) -> int:
    if options.compare and options.plan != PlanOptions.plan:
        raise Refused(f"--compare has all presets and the search; leave --plan {options.plan} out")
    for option in ("save", "html"):
        check_writable(f"--{option}", getattr(options, option))
    other = None if options.diff is None else load(options.diff)
    output = output_of(options)
    planning, plan = planning_of(options, "autopar plan")
    _check_explained(options.explain, planning)
    show_request(output, options, planning)
    if isinstance(plan, Solution):
        show_machine(output, options, planning, plan)
    if options.compare:
        planning = planning.on_mesh()
        rows = rows_of((*PRESETS, SEARCH), planning)
        show_rows(output.text, rows)
    else:
        rows = [row_of(options.plan, plan, planning)]
        show_notes(output.notes, rows[0].reports or ())
    best = cheapest(rows) or _refused(rows, planning)
    assert best.planned is not None
    if not options.compare:
        show_plan(output.text, best)
    found = {**best.found, **({"plans": [row.to_json() for row in rows]} if options.compare else {})}
    explained = _explained(options, output, rows)
    found |= _asked(options, output, rows, other, explained)
    if options.save is not None:
        _searched(rows, f"--save {options.save} writes a searched plan").save(options.save)
        words = f"{options.save} has the searched plan; parallelize(model, mesh, {options.save!r}) takes it"
        output.notes.print(words, soft_wrap=True)
    if options.html is not None:
        with doing(f"write {options.html}"):
            others = [row.alternative() for row in rows] if options.compare else []
            best.planned.page(options.html, machine=planning.machine, alternatives=others, explained=explained)
        output.notes.print(f"{options.html} has the page of the plan {best.name}", soft_wrap=True)
    output.give(found)
    return DONE


def _check_explained(names: Sequence[str], planning: Planning) -> None:
    """Refuse names of parameters, inputs and modules that there are not, before anything is searched.

    Names of other values, as ``up forward aten::mm``, are known after the capture.
    """
    model, (args, kwargs) = planning.model, split_example(planning.example)
    known = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    known += [*bind_arguments(model, args, kwargs).names, *(f"{path}()" for path, _ in model.named_modules() if path)]
    for name in names:
        if " " not in name and name not in known:
            raise Refused(no_value(name, known))


def _explained(options: PlanOptions, output: Output, rows: Sequence[PlanRow]) -> list[Explanation]:
    """Answer the questions of ``--explain``, and print the answers."""
    found = []
    for name in options.explain:
        solution = _searched(rows, f"--explain {name} asks a search")
        with doing(f"explain {name}"):
            found.append(solution.explain(name))
        output.text.print(f"\n{found[-1]}", soft_wrap=True, end="")
    return found


def _asked(
    options: PlanOptions, output: Output, rows: Sequence[PlanRow], other: Solution | None,
    explained: Sequence[Explanation],
) -> Mapping[str, Any]:  # fmt: skip
    """Return the answers to ``--explain`` and ``--diff`` as JSON; the latter is printed here."""
    found: dict[str, Any] = {}
    if other is not None:
        difference = _searched(rows, f"--diff {options.diff} compares searched plans").diff(other)
        output.text.print(f"\n{difference}", soft_wrap=True, end="")
        seconds = [difference.nanoseconds / 1e9, difference.others / 1e9]
        found["diff"] = {"seconds": seconds, "values": [list(row) for row in difference.rows]}
    for answer in explained:
        found.setdefault("explain", {})[answer.name] = [
            {"layout": row.layout, "seconds": row.nanoseconds / 1e9, "bound": row.least / 1e9, "chosen": row.chosen}
            for row in answer.alternatives
        ]
    return found


def _searched(rows: Sequence[PlanRow], what: str) -> Solution:
    """Return the plan that was searched; ``Refused`` if there is none."""
    found = next((row.solution for row in rows if row.solution is not None), None)
    if found is not None:
        return found
    planned = next((row.planned for row in rows if row.planned is not None), None)
    mesh = None if planned is None else getattr(planned, "mesh", None)
    if isinstance(mesh, Mesh) and mesh.size == 1:
        raise Refused(f"{what}, and on one rank there is nothing to search; use a --mesh of several ranks")
    raise Refused(f"{what}, and none was found; add --plan search")


def _refused(rows: Sequence[PlanRow], planning: Planning) -> PlanRow:
    """Refuse a request without a plan that fits."""
    small = min((row for row in rows if row.nanoseconds is not None), key=lambda row: row.memory, default=None)
    if small is None:
        raise Refused(f"no plan can be placed: {rows[-1].name}: {rows[-1].why}")
    assert planning.limit is not None
    which = f"the plan {small.name}" if len(rows) == 1 else f"the smallest plan, {small.name},"
    raise Refused(
        f"{which} needs {bytes_text(small.memory)} a rank, more than {bytes_text(planning.limit)}; use more ranks, or "
        f"--plan search, which keeps within the memory"
    )
