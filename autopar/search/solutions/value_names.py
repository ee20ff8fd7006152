"""Name the values of a traced program so that a saved plan can be read, and found again in another capture.

Parameters, buffers and inputs have the user's names. The value of an op has the path of its module, its phase, its op,
and, where that is not enough, a number: ``layers.0.mlp.up forward aten::mm``, ``layers.0.mlp.up backward aten::mm 2``.
"""

from __future__ import annotations

from torch import fx

from autopar.ir.nodes import is_getitem, name_of, record_of
from autopar.ir.program import Program
from autopar.ir.text.printer import target_name

OUTPUT = "output"


def value_names(program: Program) -> dict[fx.Node, str]:
    """Return node → name, for all nodes but the elements of tuples; each name once. Linear in the graph."""
    names: dict[fx.Node, str] = {}
    count: dict[str, int] = {}
    for node in program.nodes:
        if is_getitem(node):
            continue
        name = _name(node)
        number = count[name] = count.get(name, 0) + 1
        names[node] = name if number == 1 else f"{name} {number}"
    return names


def _name(node: fx.Node) -> str:
    record = record_of(node)
    if node.op == "output":
        return OUTPUT
    if node.op == "placeholder":
        return f"tangent {record.index}" if record.role == "tangent" else f"{record.role} {name_of(node)}"
    if node.op == "get_attr":
        return f"constant {node.target}"
    return f"{record.module} {record.phase} {target_name(node.target)}".strip()
