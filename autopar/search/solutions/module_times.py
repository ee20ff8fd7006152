"""Add up what each module of an explicit program takes, with the layouts of its parameters and of its result."""

from __future__ import annotations

import re
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
    """What a module takes in all phases, or equal modules of several layers together.

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


def module_times(program: Program, machine: Machine) -> list[ModuleTime]:
    """Return the times of the modules that run ops, in the order of the forward. Linear in the graph.

    Modules that differ in one number of their path only, and not in their layouts, are one row.
    """
    ops: dict[str, int] = {}
    moved: dict[str, int] = {}
    results: dict[str, str] = {}
    parameters: dict[str, dict[str, str]] = {}
    for node, cost in node_prices(program, machine):
        record = record_of(node)
        is_transfer = node.target in transfers.BY_FUNCTION
        path = record.module
        ops[path] = ops.get(path, 0) + (0 if is_transfer else cost)
        moved[path] = moved.get(path, 0) + (cost if is_transfer else 0)
        if record.phase == "forward" and isinstance(record.type, TensorType):
            results[path] = print_type(record.type)
    for node in program.placeholders:
        if record_of(node).role == "param":
            owner, _, name = name_of(node).rpartition(".")
            path = owner if owner in ops else _reader(node)
            parameters.setdefault(path, {})[name] = print_type(record_of(node).type)
    rows: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for path in ops:
        own = [f"{name} {type}" for name, type in parameters.get(path, {}).items()]
        layouts = "\n".join([*own, *([f"→ {results[path]}"] if path in results else [])])
        rows.setdefault((NUMBER.sub("#", path, 1), layouts), []).append((path, ops[path], moved[path]))
    return [
        ModuleTime(
            _joined([path for path, _, _ in alike]) or "(the model)",
            layouts,
            sum(ops for _, ops, _ in alike),
            sum(moved for _, _, moved in alike),
        )
        for (_, layouts), alike in rows.items()
    ]


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
