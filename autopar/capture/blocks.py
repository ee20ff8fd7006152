"""Find the blocks of a model, which are the layers that it repeats, by the paths of its modules.

A block is the unit that is recomputed, and the unit whose parameters are gathered together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program


def module_paths(program: Program) -> list[str]:
    """Return the paths of the modules that run ops in the forward, and of all modules around them.

    The root is ``""``.
    """
    running = dict.fromkeys(
        record_of(n).module for n in program.nodes if n.op == "call_function" and record_of(n).phase == "forward"
    )
    return list(dict.fromkeys(outer for path in running for outer in ancestors(path)))


def blocks(paths: Iterable[str]) -> frozenset[str]:
    """Return the numbered modules that contain modules and are in no other such module.

    Examples are ``h.0`` and ``encoder.block.3``. A model may have several lists of them.
    """
    paths = list(paths)
    composite = {path.rpartition(".")[0] for path in paths if path}
    numbered = {path for path in paths if path.rpartition(".")[2].isdecimal() and path in composite}
    return frozenset(path for path in numbered if not numbered.intersection(ancestors(path)[:-1]))


def ancestors(path: str) -> list[str]:
    """Return a path and all its prefixes: ``a.b`` → ``""``, ``a``, ``a.b``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:k]) for k in range(len(parts) + 1)]


def block_of(program: Program) -> Callable[[fx.Node], str]:
    """Return a function from a node to the path of its block, or of its module if the module is in no block."""
    chosen = blocks(module_paths(program))

    @cache
    def outermost(path: str) -> str:
        return next((outer for outer in ancestors(path) if outer in chosen), path)

    return lambda node: outermost(record_of(node).module)


def is_parameter(node: fx.Node) -> bool:
    """Return whether a value is a parameter, or a cast of one."""
    if node.target is transfers.cast:
        (node,) = operands(node)
    # "state" where the step updates it too
    return node.op == "placeholder" and record_of(node).role in ("param", "state")


def reader_of(transfer: fx.Node) -> fx.Node:
    """Return the first op that reads the result of a transfer, possibly through other transfers."""
    while transfer.target in transfers.BY_FUNCTION and transfer.users:
        transfer = next(iter(transfer.users))
    return transfer
