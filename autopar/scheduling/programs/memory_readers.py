"""Find the ops that read the memory of a value, through its views too.

w_dp : f32[4 8] = slice(w, 0, dp, …)       the memory of w is read by mm and by adamw
t : f32[8 8] = t(w)
mm : f32[2 8] = mm(x, t)
adamw : … = autopar::adamw(w_dp, …)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, node_at, operands
from autopar.ir.program import Program
from autopar.report.liveness import HIDDEN_VIEWS
from autopar.rules.registry import rule_of
from autopar.torch_private import OpOverload, returns_alias

# transfers whose result may be in the memory of their operand, such as the first piece of a dim
LOCAL_VIEWS = (transfers.slice, transfers.pend, transfers.cast)


class MemoryReaders:
    """The readers of memory in a program. Linear in the graph.

    Attributes:
        home: value → the value whose memory it may share: itself, or the value that it is a view of.
    """

    def __init__(self, program: Program) -> None:
        self.home: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        for node in program.nodes:
            self.home[node] = self.home[node_at(node)] if is_getitem(node) else self._home(node)

    def of(self, value: fx.Node) -> Sequence[fx.Node]:
        """Return the ops, transfers and the output that read the memory of a value, in their order. Views do not
        read."""
        return self._readers.get(self.home[value], ())

    def _home(self, node: fx.Node) -> fx.Node:
        values = operands(node)
        if values and may_be_view(node):
            return self.home[values[0]]
        for home in dict.fromkeys(self.home[value] for value in values):
            self._readers.setdefault(home, []).append(node)
        return node


def may_be_view(node: fx.Node) -> bool:
    """Return whether the result of an op or a transfer may be in the memory of its first operand."""
    if node.op != "call_function" or node.target in transfers.BY_FUNCTION:
        return node.target in LOCAL_VIEWS
    if not isinstance(node.target, OpOverload):
        return False
    return returns_alias(node.target) or node.target in HIDDEN_VIEWS or rule_of(node.target).view
