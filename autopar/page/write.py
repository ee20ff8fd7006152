"""Write the page: one HTML file that holds its data, its style and its script, and needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from autopar.errors import shown
from autopar.page.decisions import decisions
from autopar.page.figures import figures_of
from autopar.page.grids import Grids
from autopar.page.memory_over_time import memory_over_time
from autopar.page.modules import ModuleNode, module_tree
from autopar.page.subject import Part, Subject
from autopar.page.timelines import pipeline_memory, timelines


def write_page(subject: Subject, path: str | os.PathLike[str]) -> None:
    """Write the page to a file.

    Raises:
        FileNotFoundError: there is no such folder.
        IsADirectoryError: the path is a folder.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f'the page is written to a path, such as "plan.html", not to {shown(path)}')
    file = Path(path)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for the page {file}; make it first")
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; name a file in it, such as {file / 'plan.html'}")
    file.write_text(page_text(subject), encoding="utf-8")


def page_text(subject: Subject) -> str:
    """Return the page as text.

    Its element ``<script type="application/json" id="autopar">`` holds what ``figures_of`` returns.
    """
    assets = files("autopar.page") / "assets"
    read = {name: (assets / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    tree = module_tree(subject.parts, subject.machine)
    figures = figures_of(subject, tree)
    template = jinja2.Environment(autoescape=True).from_string(read["page.html"])
    return template.render(
        title=subject.title, style=read["page.css"], script=read["page.js"], figures=_json(figures),
        drawn=_json(_drawn(subject, tree, figures)),
    )  # fmt: skip


def _json(value: Any) -> str:
    """Return JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _drawn(subject: Subject, modules: ModuleNode, figures: dict[str, Any]) -> dict[str, Any]:
    """Return what the script draws besides the figures."""
    grids = Grids()
    tree = _tree(modules, grids)
    return {
        "title": subject.title, "runs": subject.runs,
        "mesh": [list(axis) for axis in subject.mesh.axes],
        "tree": tree,
        "grids": grids.rows,
        "memory": memory_over_time(subject.memory.lifetimes),
        "peaks": {row.phase: row.kinds for row in subject.memory},
        "timeline": timelines(subject),
        "pipeline_memory": pipeline_memory(subject),
        "communication": _communication(subject),
        "passes": [
            {"name": r.name, "ms": round(r.ms, 2), "inserted": r.inserted, "removed": r.removed, "commits": r.commits,
             "bytes": r.bytes}
            for r in subject.reports
        ],
        "decisions": decisions(subject.reports, subject.notes),
        "certificate": None if subject.solution is None else subject.solution.certificate,
        "alternatives": [*_alternatives(subject, figures)],
        "explained": [*_explained(subject)],
        "programs": [{"name": p.name, "times": p.times, "text": str(p.program)} for p in _shown_programs(subject)],
    }  # fmt: skip


LINES = 1500  # a longer program is not on the page


def _shown_programs(subject: Subject) -> Iterator[Part]:
    for part in subject.parts:
        if sum(1 for _ in part.program.nodes) <= LINES:
            yield part


def _tree(module: ModuleNode, grids: Grids) -> dict[str, Any]:
    return {
        "name": module.name, "path": module.path, "count": module.count,
        "parameters": [[name, grids(type)] for name, type in module.parameters.items()],
        "result": grids(module.result), "seconds": module.ops / 1e9, "transfers": module.transfers / 1e9,
        "children": [_tree(child, grids) for child in module.children.values()],
    }  # fmt: skip


def _communication(subject: Subject) -> dict[str, Any] | None:
    made = subject.communication
    if made is None:
        return None
    return {
        "makespan": made.makespan, "bound": made.bound, "exposed": made.exposed, "source": made.source,
        "notes": list(made.notes),
        "parts": [
            {"name": part.name, "times": part.times, "policy": part.schedule.policy, "makespan": part.schedule.makespan,
             "bound": part.schedule.bound, "exposed": part.schedule.exposed}
            for part in made.parts
        ],
    }  # fmt: skip


def _alternatives(subject: Subject, figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the plans that are compared, this one first, with their prices."""
    if subject.alternatives:
        yield {"name": "this plan", "seconds": figures["seconds"], "memory": figures["memory"], "note": ""}
    for other in subject.alternatives:
        yield {"name": other.name, "seconds": other.seconds, "memory": other.memory, "note": other.note}


def _explained(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield what each layout of the explained values would cost."""
    for answer in subject.explained:
        rows = [[row.layout, row.nanoseconds / 1e9, row.chosen] for row in answer.alternatives]
        yield {"name": answer.name, "rows": rows}
