"""Remember what an edit changes in a graph, and put it back.

Nothing here inverts an operation. Before a node is changed for the first time, its arguments, its record and the readers of what
it reads are noted; ``restore`` writes all of that back, whatever has happened since. So an exception at any line of a commit,
an interrupt or a lack of memory too, leaves the graph as it was; and where ``restore`` itself was interrupted, it is called again.
Notes are taken of what an edit touches. Only ``restore`` is linear in the graph.
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
    """What a program was before an edit.

    Attributes:
        inserted: the nodes that the edit has made; a node is noted here before it is part of the graph.
    """

    def __init__(self, program: ProgramData) -> None:
        self.program = program
        self.inserted: dict[fx.Node, Any] = {}
        self._counts = replace(program.counts)
        self._arguments: dict[fx.Node, tuple[tuple[Any, ...], Mapping[str, Any]]] = {}
        self._readers: dict[fx.Node, list[fx.Node]] = {}  # of what the nodes above read, in order
        self._records: dict[fx.Node, Record] = {}
        self._order: Sequence[fx.Node] | None = None  # of all nodes, once some are about to be erased
        self._tables: Mapping[Any, Sequence[fx.Node]] = {}

    def note_arguments(self, node: fx.Node) -> None:
        """Before the node reads something else."""
        if node in self._arguments or node in self.inserted:
            return
        readers = self._readers
        for operand in inputs_of(node):
            if operand not in readers:
                readers[operand] = list(operand.users)
        self._arguments[node] = node.args, node.kwargs

    def note_record(self, node: fx.Node) -> None:
        """Before the node gets another record."""
        self._records.setdefault(node, record_of(node))

    def note_erasure(self, nodes: Collection[fx.Node], order: Sequence[fx.Node]) -> None:
        """Before the first erasure; ``order`` is that of all nodes."""
        for node in nodes:
            self.note_arguments(node)
        self._tables = tables_of(self.program.graph, nodes)
        self._order = order

    def restore(self) -> None:
        """Make the program what it was, with the same node objects; linear."""
        program, inserted = self.program, self.inserted
        order = [node for node in self._order or program.nodes if node not in inserted]
        relink(program.graph, order, inserted, self._tables)
        for node, (args, kwargs) in self._arguments.items():
            set_arguments(node, args, kwargs)
        here = set(order)
        for node in order:  # a node whose making was interrupted reads its operands without being part of the graph
            for reader in [reader for reader in node.users if reader not in here]:
                del node.users[reader]
        for node, readers in self._readers.items():
            kept = [reader for reader in readers if reader in here and node in inputs_of(reader)]
            if list(node.users) != kept:
                node.users.clear()
                node.users.update(dict.fromkeys(kept))
        for node, record in self._records.items():
            if node in here:
                set_record(node, record)
        vars(program.counts).update(vars(self._counts))
        program.version += 1
