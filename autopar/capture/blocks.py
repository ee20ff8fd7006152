"""Blocks: the layers that a model repeats, by the paths of its modules.

What is computed again, and what is gathered at once, is a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program


def module_paths(program: Program) -> list[str]:
    """The modules that run ops in the forward, and those they lie in; the root is ``""``."""
    own = dict.fromkeys(record_of(n).module for n in program.nodes if n.op == "call_function" and record_of(n).phase == "forward")
    return list(dict.fromkeys(one for path in own for one in ancestors(path)))


def blocks(paths: Iterable[str]) -> frozenset[str]:
    """Numbered modules with modules of their own, not inside of another: ``h.0``, ``encoder.block.3``; those of all lists, if there are any."""
    paths = list(paths)
    composite = {path.rpartition(".")[0] for path in paths if path}
    numbered = {path for path in paths if path.rpartition(".")[2].isdecimal() and path in composite}
    return frozenset(path for path in numbered if not numbered.intersection(ancestors(path)[:-1]))


def ancestors(path: str) -> list[str]:
    """``a.b`` → ``""``, ``a``, ``a.b``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:k]) for k in range(len(parts) + 1)]


def block_of(program: Program) -> Callable[[fx.Node], str]:
    """A function of a node: the path of the block that it lies in, or of its module, where that is in none."""
    chosen = blocks(module_paths(program))

    @cache
    def outermost(path: str) -> str:
        return next((one for one in ancestors(path) if one in chosen), path)

    return lambda node: outermost(record_of(node).module)


def is_parameter(node: fx.Node) -> bool:
    """Whether a value is a parameter as it is given, or a cast of one."""
    if node.target is transfers.cast:
        (node,) = operands(node)
    return node.op == "placeholder" and record_of(node).role in ("param", "state")  # a state, where it is updated too


def reader_of(transfer: fx.Node) -> fx.Node:
    """The first op that reads what a transfer brings, or what other transfers make of it."""
    while transfer.target in transfers.BY_FUNCTION and transfer.users:
        transfer = next(iter(transfer.users))
    return transfer
