"""Read a searched plan from JSON.

The file has everything that decides the plan: the mesh, the machine with its figures, the digest of the traced program,
the price, the bound, and the layouts of all values by the names of ``value_names``, written as programs print them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.costs.machine import described
from autopar.errors import PlanError, shown
from autopar.ir.mesh import Mesh
from autopar.search.solutions.planned import Planned
from autopar.search.solutions.searched_update import update_from
from autopar.search.solutions.solution import KINDS, VERSION, Solution
from autopar.search.solutions.step_choice import choice_from

MOST = 2**63  # of nanoseconds and bytes


def load(path: str | Path) -> Solution:
    """Read a plan that ``Solution.save`` wrote.

    Raises:
        PlanError: the file is malformed; the error names the field.
        FileNotFoundError: there is no such file.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path} with a plan; solution.save writes one") from None
    except (ValueError, RecursionError) as error:  # of characters, nesting, or numbers with thousands of digits
        raise PlanError(f"{path}: the file is not JSON: {error}") from None
    return from_json(content, path)


def from_json(content: Any, path: str | Path = "") -> Solution:
    """Read a plan from JSON; errors begin with the path of its file, if it has one."""
    source, path = str(path), path or "plan"
    try:
        return replace(_read(content, path), source=source)
    except _Malformed as error:
        raise PlanError(f"{path}: {error}") from None
    except (ValueError, TypeError) as error:  # of the mesh or the machine
        text = str(error)
        raise PlanError(text if text.startswith(str(path)) else f"{path}: {text}") from None


class _Malformed(Exception):
    """A field is missing or has a wrong value."""


def _read(content: Any, path: str | Path) -> Solution:
    if not isinstance(content, dict) or "version" not in content:
        raise _Malformed("version: missing; this is no plan of a search")
    if content["version"] != VERSION:
        raise _Malformed(f"version: {shown(content['version'])} is not known; this autopar reads version {VERSION}")
    mesh = _field(content, "mesh", dict)
    nanoseconds = _number(content, "nanoseconds", int)
    least, seconds = (float(_number(content, name, (int, float))) for name in ("least", "search_seconds"))
    if least > nanoseconds + 1:
        raise _Malformed(f"least: {least:g} is no lower bound of the price, {nanoseconds} nanoseconds")
    machines = described(_field(content, "machine", dict), path)
    if len(machines) != 1:
        raise _Malformed(f"machine: one machine is wanted, not {len(machines)}")
    values = {name: _planned(row, f"values.{name}") for name, row in _field(content, "values", dict).items()}
    reason, kind, graph = (_field(content, name, str) for name in ("reason", "kind", "graph"))
    if kind not in KINDS:
        raise _Malformed(f"kind: {shown(kind)} is none of {', '.join(KINDS)}")
    start, states = content.get("start", ""), content.get("optimizer_states", {})
    if not isinstance(start, str):
        raise _Malformed(f"start: the name of a preset is wanted, not {shown(start)}")
    if not isinstance(states, dict) or not all(isinstance(text, str) for text in states.values()):
        raise _Malformed('optimizer_states: layouts are wanted by name, as {"up.weight": "[64/dp 128]"}')
    step = None if content.get("step") is None else choice_from(content["step"])
    update = None if content.get("update") is None else update_from(content["update"])
    memory = None if content.get("memory") is None else _number(content, "memory", (int, float), 1e300)
    bytes = None if content.get("bytes") is None else _number(content, "bytes", int)
    alike = None if content.get("alike") is None else _number(content, "alike", int)
    constrained = content.get("constrained", False)
    if not isinstance(constrained, bool):
        raise _Malformed(f"constrained: {shown(constrained)} is neither true nor false")
    return Solution(
        machines[0], nanoseconds, least, seconds, reason, Mesh(mesh), kind, graph, values, states, start, step,
        memory=memory, bytes=bytes, alike=alike, constrained=constrained, update=update,
    )  # fmt: skip


def _planned(row: Any, at: str) -> Planned:
    if not isinstance(row, dict):
        raise _Malformed(f"{at}: an object is wanted, not {shown(row)}")
    gives, needs = (_field(row, kind, list, f"{at}.") for kind in ("gives", "needs"))
    if not all(text is None or isinstance(text, str) for text in gives) or not all(
        isinstance(text, str) for text in needs
    ):
        raise _Malformed(f'{at}: layouts are strings, as "[64/tp 128]"')
    inside = _field(row, "inside", list, f"{at}.") if "inside" in row else []
    return Planned(
        tuple(gives), tuple(needs), tuple(_planned(step, f"{at}.inside[{k}]") for k, step in enumerate(inside))
    )


def _number(content: Mapping[str, Any], name: str, kind: type | tuple[type, ...], most: float = MOST) -> Any:
    value = _field(content, name, kind)
    if not 0 <= value <= most:
        raise _Malformed(f"{name}: {shown(value)} is no number from 0 to {most:g}")
    return value


def _field(content: Mapping[str, Any], name: str, kind: type | tuple[type, ...], at: str = "") -> Any:
    if name not in content:
        raise _Malformed(f"{at}{name}: missing")
    value = content[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Malformed(f"{at}{name}: {shown(value)} is not of the right kind")
    return value
