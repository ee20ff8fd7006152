"""Make the digest of a program, by which files and caches know it again."""

from __future__ import annotations

import hashlib

from autopar.ir.at_values import at_values
from autopar.ir.program import Program


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
