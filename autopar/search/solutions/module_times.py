"""Add up what each module of an explicit program takes, with the layouts of its parameters and of its result."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.costs.machine import Machine
from autopar.costs.program_price import node_prices
from autopar.ir import transfers
from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer, as in layers.3.mlp


@dataclass(frozen=True)
class ModuleTime:
    """What a module takes in all phases, or equal modules of several layers together, without the modules inside.

    Attributes:
        module: its path; ``layers.0-31.mlp`` stands for the modules of these layers.
        layouts: the types of its parameters and of its last result.
        ops: nanoseconds of its ops.
        transfers: nanoseconds of the transfers of its values, and of its gradients.
    """

    module: str
    layouts: str
    ops: int
    transfers: int


def module_times(programs: Sequence[tuple[Program, int]], machine: Machine) -> list[ModuleTime]:
    """Return the times of the modules that run ops, each before those inside of it, in the order of the forward.

    Linear in the graphs. Modules that differ in one number of their path only, and not in their layouts, are one row.

    Args:
        programs: each explicit program, and how often it runs.
    """
    ops: dict[str, int] = {}
    moved: dict[str, int] = {}
    results: dict[str, str] = {}
    parameters: dict[str, dict[str, str]] = {}
    for program, times in programs:
        for node, cost in node_prices(program, machine):
            record = record_of(node)
            is_transfer = node.target in transfers.BY_FUNCTION
            path = record.module
            ops[path] = ops.get(path, 0) + (0 if is_transfer else times * cost)
            moved[path] = moved.get(path, 0) + (times * cost if is_transfer else 0)
            if record.phase == "forward" and isinstance(record.type, TensorType):
                results[path] = print_type(record.type)
    for program, _ in programs:
        for node in program.placeholders:
            if record_of(node).role == "param":
                owner, _, name = name_of(node).rpartition(".")
                path = owner if owner in ops else _reader(node)
                parameters.setdefault(path, {}).setdefault(name, print_type(record_of(node).type))
    rows: dict[tuple[str, str], list[str]] = {}
    for path in _from_outside(ops):
        own = [f"{name} {type}" for name, type in parameters.get(path, {}).items()]
        layouts = "\n".join([*own, *([f"→ {results[path]}"] if path in results else [])])
        rows.setdefault((NUMBER.sub("#", path, 1), layouts), []).append(path)
    return [
        ModuleTime(
            _joined(alike) or "(the model)", layouts, sum(ops[path] for path in alike),
            sum(moved[path] for path in alike),
        )
        for (_, layouts), alike in rows.items()
    ]  # fmt: skip


def _from_outside(paths: Iterable[str]) -> list[str]:
    """Return paths in their order, but each before those inside of it."""
    first: dict[str, int] = {}  # path, or the beginning of one → where it comes first
    trails: dict[str, list[int]] = {}
    for path in paths:
        parts = path.split(".") if path else []
        heads = [".".join(parts[: k + 1]) for k in range(len(parts))]
        trails[path] = [first.setdefault(head, len(first)) for head in heads]
    return sorted(trails, key=lambda path: trails[path])


def _reader(parameter: fx.Node) -> str:
    """Return the module of the first op that reads a parameter."""
    for user in parameter.users:
        if user.op == "call_function":
            return record_of(user).module
    return ""


def _joined(paths: list[str]) -> str:
    """Return one path for several that differ in their first number: ``layers.0-3.mlp``."""
    if len(paths) == 1:
        return paths[0]
    numbers = sorted(int(match[0]) for path in paths if (match := NUMBER.search(path)))
    first, last = numbers[0], numbers[-1]
    text = f"{first}-{last}" if numbers == [*range(first, last + 1)] else ",".join(map(str, numbers))
    return NUMBER.sub(text, paths[0], 1)
