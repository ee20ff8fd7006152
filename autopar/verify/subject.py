"""Hold the program that is verified, and make the errors about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from autopar.errors import VerifyError
from autopar.ir.layout import Layout
from autopar.ir.nodes import has_record, record_of
from autopar.ir.program import Program
from autopar.ir.states import started_states
from autopar.ir.text.printer import print_node
from autopar.rules.binding import drawn_alike


@dataclass
class Subject:
    """A program that is verified.

    Attributes:
        made_by: the pass that made it, which errors name.
        unwaited: the collectives that are started and not waited for yet.
        messages: message → the lines that start its members, so far; ``waited``: those of them that are waited for.
        last_message: the message of the last line, and whether it waits for it.
        right: Layouts that are right for values of a shape. A program has few.
    """

    program: Program
    made_by: str
    unwaited: dict[fx.Node, None] = field(default_factory=dict)
    messages: dict[str, list[fx.Node]] = field(default_factory=dict)
    waited: dict[str, list[fx.Node]] = field(default_factory=dict)
    last_message: tuple[str, bool] = ("", False)
    right: set[tuple[Layout, tuple[int, ...]]] = field(default_factory=set)

    @cached_property
    def drawn_alike(self) -> dict[fx.Node, fx.Node]:
        """Op → an earlier op whose random numbers it draws again."""
        return drawn_alike(self.program.nodes)

    @cached_property
    def started_before(self) -> dict[fx.Node, fx.Node]:
        """State that the run before has started → the start of the same collective, which replaces it."""
        return started_states(self.program)

    def head(self, name: str = "") -> str:
        """Return the first line of an error: ``reshard left relu inconsistent``, or without the pass if it is not
        known."""
        if self.made_by:
            return f"{self.made_by} left {name or 'the program'} inconsistent\n"
        return f"this {self.program.level} program is inconsistent{name and f' at {name}'}\n"

    def error(self, node: fx.Node, why: str, *operands: object) -> VerifyError:
        """Return an error with the offending lines, the user's source line, the rule and the remedy."""
        lines = []
        for value in dict.fromkeys((*operands, node)):
            if isinstance(value, fx.Node) and value.op != "output" and has_record(value):
                source = record_of(value).source if value is node else ""
                lines.append(f"  {self.line(value)}{source and f'          {source}'}\n")
        return VerifyError(f"{self.head(node.name)}{''.join(lines)}  {why}")

    def line(self, node: fx.Node) -> str:
        try:
            return print_node(self.program, node)
        except (KeyError, TypeError, ValueError):  # a record that is broken
            return f"  {node.name} does not print"
