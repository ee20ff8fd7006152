"""Remember what an edit changes in a graph, and put it back.

No operation is inverted. Before a node is changed for the first time, its arguments, its record and the readers of its
operands are noted; ``restore`` writes all of that back, whatever has happened since. So an exception at any line of a
commit, also an interrupt or a lack of memory, leaves the graph as it was. If ``restore`` itself is interrupted, it is
called again. The notes grow with the edit. Only ``restore`` is linear in the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ir.nodes import record_of, set_record
from autopar.ir.program_data import ProgramData
from autopar.ir.record import Record
from autopar.torch_private import inputs_of, relink, set_arguments, tables_of


class Undo:
    """The state of a program before an edit.

    Attributes:
        inserted: the nodes that the edit has made; a node is noted before it becomes part of the graph.
    """

    def __init__(self, program: ProgramData) -> None:
        self.program = program
        self.inserted: dict[fx.Node, Any] = {}
        self._counts = replace(program.counts)
        self._arguments: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}  # operand of the nodes above → its readers, in order
        self._records: dict[fx.Node, Record] = {}
        self._order: Sequence[fx.Node] | None = None  # all nodes in order, once some are about to be erased
        self._tables: Mapping[Any, Sequence[fx.Node]] = {}

    def note_arguments(self, node: fx.Node) -> None:
        """Call this before the node's operands change."""
        if node in self._arguments or node in self.inserted:
            return
        readers = self._readers
        for operand in inputs_of(node):
            if operand not in readers:
                readers[operand] = list(operand.users)
        self._arguments[node] = node.args, node.kwargs

    def note_record(self, node: fx.Node) -> None:
        """Call this before the node gets another record."""
        self._records.setdefault(node, record_of(node))

    def note_erasure(self, nodes: Collection[fx.Node], order: Sequence[fx.Node]) -> None:
        """Call this before the first erasure; ``order`` has all nodes."""
        for node in nodes:
            self.note_arguments(node)
        self._tables = tables_of(self.program.graph, nodes)
        self._order = order

    def restore(self) -> None:
        """Restore the program, with the same node objects. Linear in the graph."""
        program, inserted = self.program, self.inserted
        order = [node for node in self._order or program.nodes if node not in inserted]
        relink(program.graph, order, inserted, self._tables)
        for node, (args, kwargs) in self._arguments.items():
            set_arguments(node, args, kwargs)
        present = set(order)
        for node in order:  # a node whose creation was interrupted reads operands without being part of the graph
            for reader in [reader for reader in node.users if reader not in present]:
                del node.users[reader]
        for node, readers in self._readers.items():
            kept = [reader for reader in readers if reader in present and node in inputs_of(reader)]
            if list(node.users) != kept:
                node.users.clear()
                node.users.update(dict.fromkeys(kept))
        for node, record in self._records.items():
            if node in present:
                set_record(node, record)
        vars(program.counts).update(vars(self._counts))
        program.version += 1
