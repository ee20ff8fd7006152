"""Give the figures of a call or a step as data that JSON can hold.

Commands print these figures, and the page embeds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from autopar.ir.text.printer import print_type
from autopar.page.modules import ModuleNode, module_tree
from autopar.page.subject import Subject
from autopar.page.transfer_rows import transfer_rows


def figures_of(subject: Subject, tree: ModuleNode | None = None) -> dict[str, Any]:
    """Return the figures of one call or step. ``tree``: its modules, if they are known already.

    ``title``: what has these figures, and of which batch. ``seconds``: its price on the machine, its ops and transfers
    added up; of a pipelined step the simulated seconds. ``bound``: no plan takes less;
    ``gap``: how much dearer than the bound the plan is, relative to the bound; both are ``None`` where nothing was
    searched. ``memory``: bytes of a rank at the peak. ``transfers``: a row for equal transfers of all layers, with
    ``transfer axis phase module source times bytes seconds`` and the program they are in, ``part``. ``modules``: a row
    for each module, those that are alike together, with ``module count parameters result seconds transfer_seconds``.
    ``machine``: ``name`` and ``note``.
    """
    solution, tree = subject.solution, tree or module_tree(subject.parts, subject.machine)
    searched = solution is not None and solution.machine == subject.machine
    return {
        "title": subject.title,
        "seconds": subject.seconds if subject.seconds is not None else (tree.ops + tree.transfers) / 1e9,
        "bound": solution.bound if searched and solution is not None else None,
        "gap": _finite(solution.gap) if searched and solution is not None else None,
        "memory": subject.memory.peak,
        "transfers": [
            asdict(row) for row in transfer_rows(subject.parts, subject.machine, subject.messages, subject.between)
        ],
        "modules": [*_rows(tree, "")],
        "machine": {"name": subject.machine.name, "note": subject.machine.note},
    }


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
