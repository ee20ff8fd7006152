"""Draw the model as a tree of modules: the layouts of parameters and results, and what each module costs.

Modules that are alike are one: ``layers.0-31`` stands for 32 layers whose parameters and results have the same types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.costs.machine import Machine
from autopar.costs.program_price import node_prices
from autopar.ir import transfers
from autopar.ir.nodes import name_of, record_of
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.page.subject import Part

FORWARD = "forward"


@dataclass
class ModuleNode:
    """A module of the tree, or several that are alike.

    Attributes:
        name: the last part of its path, ``q_proj`` or ``0-31``.
        path: the path of the first one.
        count: how many modules it stands for.
        parameters: name → type.
        result: the type of its last result in forward.
        ops, transfers: nanoseconds of one step, of all modules that it stands for, children included.
        children: the modules inside.
    """

    name: str
    path: str
    count: int = 1
    parameters: dict[str, TensorType] = field(default_factory=dict)
    result: TensorType | None = None
    ops: int = 0
    transfers: int = 0
    children: dict[str, ModuleNode] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[object, ...]:
        """What two modules must have in common to be alike."""
        own = tuple((name, print_type(type)) for name, type in self.parameters.items())
        result = None if self.result is None else print_type(self.result)
        return own, result, tuple((child.name, child.shape) for child in self.children.values())

    def walk(self) -> Iterable[ModuleNode]:
        """Yield this module and all inside."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def module_tree(parts: Sequence[Part], machine: Machine) -> ModuleNode:
    """Return the tree of the modules of a step. Linear in the graphs and in the modules."""
    root = ModuleNode("", "")
    seen: dict[str, list[ModuleNode]] = {"": [root]}
    for part in parts:
        for node, cost in node_prices(part.program, machine):
            record = record_of(node)
            trail = _trail(record.module, seen)
            moved = node.target in transfers.BY_FUNCTION
            for module in trail:
                module.transfers += part.times * cost if moved else 0
                module.ops += 0 if moved else part.times * cost
                if record.phase == FORWARD and isinstance(record.type, TensorType) and not moved:
                    module.result = record.type
    for part in parts:
        for node in part.program.placeholders:
            record = record_of(node)
            if record.role == "param" and isinstance(record.type, TensorType):
                owner, _, name = name_of(node).rpartition(".")
                _trail(owner, seen)[-1].parameters[name] = record.type
    return _folded(root)


def _trail(path: str, seen: dict[str, list[ModuleNode]]) -> list[ModuleNode]:
    """Return the modules from the root to a path; those that are missing are made."""
    if path not in seen:
        above, _, name = path.rpartition(".")
        trail = _trail(above, seen)
        seen[path] = [*trail, trail[-1].children.setdefault(name, ModuleNode(name, path))]
    return seen[path]


def _folded(module: ModuleNode) -> ModuleNode:
    """Fold neighbouring children that have numbers as names and are alike."""
    folded: dict[str, ModuleNode] = {}
    last: tuple[object, ModuleNode] | None = None
    for name, child in module.children.items():
        child = _folded(child)
        shape = child.shape if re.fullmatch(r"\d+", name) else None
        if last is not None and shape is not None and last[0] == shape:
            _add(last[1], child)
            continue
        folded[name] = child
        last = (shape, child) if shape is not None else None
    module.children = {child.name: child for child in folded.values()}
    return module


def _add(into: ModuleNode, other: ModuleNode) -> None:
    """Add a module to one that it is like."""
    if re.fullmatch(r"\d+", other.name):
        into.name = f"{into.name.partition('-')[0]}-{other.name}"
    into.count, into.ops, into.transfers = into.count + 1, into.ops + other.ops, into.transfers + other.transfers
    for own, its in zip(into.children.values(), other.children.values(), strict=True):
        _add_inside(own, its)


def _add_inside(into: ModuleNode, other: ModuleNode) -> None:
    into.ops, into.transfers = into.ops + other.ops, into.transfers + other.transfers
    for own, its in zip(into.children.values(), other.children.values(), strict=True):
        _add_inside(own, its)
