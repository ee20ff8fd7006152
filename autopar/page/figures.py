"""Give the figures of a call or a step as data that JSON can hold.

Commands print these figures, and the page embeds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from autopar.costs.program_price import node_prices
from autopar.ir.text.printer import print_type
from autopar.page.modules import ModuleNode, module_tree
from autopar.page.subject import Subject
from autopar.page.transfer_rows import transfer_rows


def figures_of(subject: Subject) -> dict[str, Any]:
    """Return the figures of one call or step.

    ``seconds``: its price on the machine, of a pipelined step the simulated seconds. ``bound``: no plan takes less;
    ``gap``: how much dearer than the bound the plan is, relative to the bound; both are ``None`` where nothing was
    searched. ``memory``: bytes of a rank at the peak. ``transfers``: a row for equal transfers of all layers, with
    ``transfer axis phase module source times bytes seconds`` and the program they are in, ``part``. ``modules``: a row
    for each module, those that are alike together, with ``module count parameters result seconds transfer_seconds``.
    ``machine``: ``name`` and ``note``.
    """
    solution = subject.solution
    searched = solution is not None and solution.machine == subject.machine
    return {
        "seconds": seconds_of(subject),
        "bound": solution.bound if searched and solution is not None else None,
        "gap": _finite(solution.gap) if searched and solution is not None else None,
        "memory": subject.memory.peak,
        "transfers": [asdict(row) for row in transfer_rows(subject.parts, subject.machine, subject.messages)],
        "modules": [*_rows(module_tree(subject.parts, subject.machine), "")],
        "machine": {"name": subject.machine.name, "note": subject.machine.note},
    }


def seconds_of(subject: Subject) -> float:
    """Return the seconds of one call or step."""
    if subject.seconds is not None:
        return subject.seconds
    return (
        sum(part.times * cost for part in subject.parts for _, cost in node_prices(part.program, subject.machine)) / 1e9
    )


def _rows(module: ModuleNode, above: str) -> Iterator[dict[str, Any]]:
    path = f"{above}.{module.name}".lstrip(".")
    yield {
        "module": path,
        "count": module.count,
        "parameters": {name: print_type(type) for name, type in module.parameters.items()},
        "result": None if module.result is None else print_type(module.result),
        "seconds": module.ops / 1e9,
        "transfer_seconds": module.transfers / 1e9,
    }
    for child in module.children.values():
        yield from _rows(child, path)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
