"""Read the lines below the values: what is returned, gradients, and requirements on next states."""

from __future__ import annotations

from torch import fx

from autopar.ir.record import Record, Requirement, Result
from autopar.ir.text.definitions import read_operand
from autopar.ir.text.header import Header
from autopar.ir.text.tokens import WORDS, Cursor
from autopar.ir.text.values import Values

Row = tuple[Result, fx.Node, Requirement | None]


class ResultParser:
    """What the program gives.

    Attributes:
        tree: the text fragments around the returned values.
    """

    def __init__(self, cursor: Cursor, header: Header, values: Values) -> None:
        self.cursor, self.header, self.values = cursor, header, values
        self.tree: tuple[str, ...] = ()
        self.returns: list[Row] = []
        self.grads: list[Row] = []
        self.state_needs: dict[str, Requirement | None] = {}

    def return_line(self) -> None:
        """Read the tree, which is Python: quoted keys, ``Class(field=value)``, tuples, lists, dicts. Bare names are
        values."""
        cursor = self.cursor
        if self.tree:
            raise cursor.error("the program returns twice")
        cursor.word("return")
        fragments, done = [""], cursor.tokens[0].end + 1
        while cursor.follows():
            token = cursor.tokens[cursor.at]
            if token.kind == "word" and token.text not in WORDS and cursor.look(1) not in ("=", "("):
                fragments[-1] += cursor.line[done : token.start]
                fragments.append("")
                self.returns.append((Result("return"), *self._use()))
            else:
                cursor.at += 1
                fragments[-1] += cursor.line[done : token.end]
            done = cursor.tokens[cursor.at - 1].end
        self.tree = tuple(fragments)

    def grad_line(self) -> None:
        cursor, nodes = self.cursor, self.values.nodes
        cursor.word("grad")
        of = cursor.word()
        if of not in nodes or nodes[of].op != "placeholder":
            raise cursor.error(f"{of} is no placeholder of the program")
        if any(result.of == of for result, _, _ in self.grads):
            raise cursor.error(f"the gradient of {of} is given twice")
        cursor.sign("=")
        self.grads.append((Result("grad", of), *self._use()))

    def state_line(self) -> None:
        """Read the required Layout of a next state. Such a line is written only where it differs from the value's
        Layout."""
        cursor, states = self.cursor, self.values.states
        cursor.word("state")
        of = cursor.word()
        if of not in states:
            raise cursor.error(f"{of} is no state of the program")
        if of in self.state_needs:
            raise cursor.error(f"the next value of {of} is given twice")
        cursor.sign("=")
        value, need = self._use()
        if value.name != states[of][0]:
            raise cursor.error(f"the state {of} is replaced by {states[of][0]}, as its placeholder says")
        self.state_needs[of] = need

    def _use(self) -> tuple[fx.Node, Requirement | None]:
        return self.values.use(read_operand(self.cursor), self.header.may_require)

    def output(self) -> tuple[tuple[fx.Node, ...], Record]:
        """Return the arguments of the output node, and its record."""
        values, rows = self.values, [*self.returns, *self.grads]
        for name, (after, where) in values.states.items():
            if after not in values.nodes:
                raise self.cursor.error(
                    f"the state {name} is replaced by {after}, which is no value of the program", where
                )
            need = self.state_needs.get(name, values.own[after])
            rows.append((Result("state", name), values.nodes[after], need))
        uses = values.recorded(need for _, _, need in rows)
        return tuple(node for _, node, _ in rows), Record(None, uses, results=tuple(result for result, _, _ in rows))
