"""The smallest case that ends as a given one does."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from model_cases import OTHER, Case, Outcome, check


def smallest(case: Case, seconds: float = 60.0) -> Case:
    """The smallest case found that ends as this one does."""
    wanted = check(case)
    end = time.monotonic() + seconds
    again = True
    while again and time.monotonic() < end:
        again = False
        for one in smaller(case):
            if time.monotonic() > end:
                break
            outcome = check(one)
            if (outcome.kind, _manner(outcome)) == (wanted.kind, _manner(wanted)):
                case, again = one, True
                break
    return case


def _manner(outcome: Outcome) -> str:
    """Why a case ends as it does; where numbers differ, without the value: the simpler case may show it elsewhere."""
    return OTHER if outcome.reason.startswith(OTHER) else outcome.reason


def smaller(case: Case) -> Iterator[Case]:
    """Simpler cases, the simplest first; not all of them are valid."""
    if isinstance(case.plan, dict) and case.plan:
        yield replace(case, plan={})
        if any(glob.endswith("()") for glob in case.plan):  # these refuse a case without the lines that call the module
            yield replace(case, plan={glob: spec for glob, spec in case.plan.items() if not glob.endswith("()")})
    names = re.findall(r"\b[a-z]+\d+\b|\b[a-z]\b", case.result)
    if len(names) > 1 or case.result not in names:
        yield from (replace(case, result=name, given=None) for name in dict.fromkeys(names))
    drawn = {key: value for key, value in case.options.items() if key == "random"}
    for change in (
        {"changes": ()},
        *({"calls": n} for n in range(1, case.calls)),
        {"loss": "weights"},
        {"grad": True},
        {"training": True},
        {"given": None},
        {"options": drawn},
        {"keywords": ()},
    ):
        ((key, value),) = change.items()
        if getattr(case, key) != value:
            yield replace(case, **change)
    for axis, size in case.mesh.items():
        if len(case.mesh) > 1:
            yield replace(
                case, mesh={a: n for a, n in case.mesh.items() if a != axis}, plan=_without_axis(case.plan, axis)
            )
        if size > 2:
            yield replace(case, mesh={**case.mesh, axis: 2})
    if len(read := _read(case)) < (count := len(case.lines)):
        yield replace(case, lines=read)
    for size in (count // 2, count // 4, 1):
        for k in range(count - size, -1, -max(size, 1)) if size else ():
            yield replace(case, lines=case.lines[:k] + case.lines[k + size :])
    for k, line in enumerate(case.lines):
        name = line.split(" = ")[0]
        if name in case.shapes and name not in case.inputs:
            inputs = {**case.inputs, name: case.shapes[name]}
            yield replace(case, inputs=inputs, lines=case.lines[:k] + case.lines[k + 1 :])
    text = "\n".join((*case.lines, case.result))
    for name in case.inputs:
        if not re.search(rf"\b{name}\b", text):
            yield replace(case, inputs={k: v for k, v in case.inputs.items() if k != name},
                          keywords=tuple(k for k in case.keywords if k != name),
                          plan=_without(case.plan, name))  # fmt: skip
        elif "grad=True" in case.inputs[name]:
            yield replace(case, inputs={**case.inputs, name: case.inputs[name].replace(", grad=True", "")})
    for k in range(len(case.init)):
        attribute = re.search(r"self\.(\w+)|\"(\w+)\"", case.init[k])
        name = attribute[1] or attribute[2] if attribute else ""
        yield replace(case, init=case.init[:k] + case.init[k + 1 :], plan=_without(case.plan, name))
    if isinstance(case.plan, dict):
        for glob, spec in case.plan.items():
            yield replace(case, plan={g: s for g, s in case.plan.items() if g != glob})
            if isinstance(spec, tuple):
                yield from (
                    replace(case, plan={**case.plan, glob: (*spec[:d], None, *spec[d + 1 :])})
                    for d, entry in enumerate(spec)
                    if entry
                )


def _read(case: Case) -> tuple[str, ...]:
    """The lines that lead to the result, where names are written once; writes in place are lost."""
    kept: list[str] = []
    text = case.result
    for line in reversed(case.lines):
        if re.search(rf"\b{re.escape(line.split(' = ')[0])}\b", text):
            kept.append(line)
            text += line
    return tuple(reversed(kept))


def _without(plan: Any, name: str) -> Any:
    return (
        {g: s for g, s in plan.items() if g.lstrip("*.").split(".")[0].removesuffix("()") != name}
        if isinstance(plan, dict)
        else plan
    )


def _without_axis(plan: Any, axis: str) -> Any:
    def strip(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(strip(e) for e in entry if e != axis)
        return None if entry == axis else entry.replace(f"/{axis}", "") if isinstance(entry, str) else entry

    return (
        {g: tuple(None if e == axis else strip(e) for e in s) if isinstance(s, tuple) else s for g, s in plan.items()}
        if isinstance(plan, dict)
        else plan
    )
