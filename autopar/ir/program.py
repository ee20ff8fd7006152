"""Define the program that users see: edit it, print and parse it, compare it, verify it, know it by its digest."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from typing import ClassVar

from autopar.errors import shown
from autopar.ir.at_values import at_values
from autopar.ir.edit import Edit
from autopar.ir.program_data import ProgramData
from autopar.ir.sizes import symbol, values_text
from autopar.ir.text.parser import parse_program
from autopar.ir.text.printer import print_program
from autopar.notebook import ProgramInNotebook


class Program(ProgramInNotebook, ProgramData):
    """A captured step on a mesh: an FX graph of functional ATen ops, one record a node, and a level.

    The attributes are those of ``ProgramData``.
    """

    __hash__ = None  # mutable

    verifier: ClassVar[Callable[[Program], None]]  # ``autopar.verify.levels`` sets it: rules stand above programs

    def edit(self, *, sync: bool = False) -> Edit:
        """Return a batch of edits, which is committed once, when its ``with`` block ends.

        ``sync=True`` commits after every op.
        """
        return Edit(self, sync=sync)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Program {self.level} on {self.mesh}: {len(self.graph.nodes)} nodes>"

    def text(self, *, comments: bool = False) -> str:
        """Print one line per value; ``comments=True`` adds module paths and source lines."""
        return print_program(self, comments=comments)

    @staticmethod
    def parse(text: str) -> Program:
        """Return the program that prints as ``text``; ``TextError`` names the line and what is wrong with it."""
        if not isinstance(text, str):
            raise TypeError(f"Program.parse takes the text of a program, not {shown(text)}")
        return parse_program(text, Program)

    def at_sizes(self, **sizes: int) -> Program:
        """Return the program of other sizes, without symbols: ``program.at_sizes(s0=3, s1=100)``.

        Symbols that are not named keep the sizes of the call that was captured. Verify the result: a layout may not be
        one of these sizes.

        Raises:
            ValueError: the program has no such symbol, or a size is below 0 or no whole number.
        """
        values = dict(self.sizes)
        for name, size in sizes.items():
            if symbol(name) not in values:
                raise ValueError(f"the program has no size {name!r}; it has {values_text(values) or 'none'}")
            values[symbol(name)] = size
        return at_values(self, values)

    def diff(self, other: Program | str) -> str:
        """Return the lines that differ: with ``-`` those of this program, with ``+`` those of ``other``."""
        lines = difflib.unified_diff(str(self).splitlines(), str(other).splitlines(), lineterm="", n=1)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))

    def verify(self) -> None:
        """Check what the level promises; ``VerifyError`` otherwise."""
        verifier = type(self).verifier
        if verifier is None:
            raise RuntimeError("what verifies programs is not loaded; import autopar.verify.levels")
        verifier(self)


def program_digest(program: Program) -> str:
    """Return the digest of a program's text; the names of its values count.

    Of a program with symbols, it is that of the program of the sizes that were captured.
    """
    if program.sizes:
        program = at_values(program, program.sizes)
    return text_digest(str(program))


def text_digest(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
