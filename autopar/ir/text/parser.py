"""Parse the text of a program, line by line. ``GRAMMAR.md`` has the grammar.

What a type or a definition is written as depends on no other line, so its text is read once (``memo``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from autopar.errors import TextError
from autopar.ir.nodes import set_record
from autopar.ir.program_data import LEVELS, ProgramData
from autopar.ir.record import PHASES
from autopar.ir.text.definitions import Definition, Issue, read_definition, read_issue, stays
from autopar.ir.text.header import Header, types_under
from autopar.ir.text.memo import Memo
from autopar.ir.text.results import ResultParser
from autopar.ir.text.tokens import RESERVED, Cursor, can_name
from autopar.ir.text.values import Values

P = TypeVar("P", bound=ProgramData)

_VALUE = re.compile(r"  (\w+)\s*:\s*([^=]*?)\s*=\s*(.*?)\s*", re.ASCII)
_definitions: Memo[tuple[Definition, Issue]] = Memo()  # text behind "=" → what it says, and where it is issued


def parse_program(text: str, make: type[P]) -> P:
    """Return what ``make`` builds of a text; ``TextError`` names the line and what is wrong with it."""
    return _Parser().program(text, make)


def forget() -> None:
    """Forget all texts that were read, as a new process has none."""
    _definitions.clear()
    types_under.cache_clear()


class _Parser:
    """Goes from line to line, and gives each to what reads it."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        self.header = Header(self.cursor)
        self.values = Values(self.cursor, self.header)
        self.results = ResultParser(self.cursor, self.header, self.values)

    def program(self, text: str, make: type[P]) -> P:
        for number, line in enumerate(text.splitlines(), 1):
            value = _VALUE.fullmatch(line)
            if value and value[1] not in RESERVED and self.header.level:
                self.value_line(number, line, value)
            else:
                self.line(number, line)
        header, values = self.header, self.values
        if not header.level:
            raise TextError("an empty text is not a program; it starts with a header, as in 'program traced'")
        nodes, record = self.results.output()
        set_record(values.graph.output(nodes), record)
        return make(values.graph, header.level, header.mesh, stages=header.stages, streams=tuple(header.streams),
                    coordinates=header.coordinates, tree=self.results.tree, constants=values.constants)  # fmt: skip

    def line(self, number: int, line: str) -> None:
        """Read a line of any kind."""
        cursor, header, results = self.cursor, self.header, self.results
        cursor.open(number, line)
        if not cursor.tokens:
            return
        readers: dict[str, Callable[[], None]] = {
            "program": header.program_line,
            "sizes": header.sizes_line,
            "stage": header.stage_line,
            "stream": header.stream_line,
            **dict.fromkeys(PHASES, self.phase_line),
            "  return": results.return_line,
            "  grad": results.grad_line,
            "  state": results.state_line,
        }
        start = "  " * line.startswith("  ") + line[: cursor.tokens[0].end].strip()
        read = readers.get(start, self.any_value_line if line.startswith("  ") else None)
        if read is None or line[0].isspace() != line.startswith("  "):
            raise cursor.error(
                "a line starts with 'program', 'sizes', 'stage', 'stream', a phase, or two spaces and a value"
            )
        if (start == "program") != (not header.level):
            raise cursor.error(
                f"the first line, and no other, is the header, as in 'program explicit on dp=2'; levels are "
                f"{', '.join(LEVELS)}"
            )
        read()
        cursor.close()

    def phase_line(self) -> None:
        self.values.phase = self.cursor.word()
        self.cursor.sign(":")

    # -- values --------------------------------------------------------------------------------------------------------

    def value_line(self, number: int, line: str, match: re.Match[str]) -> None:
        """Read the line of a value in its usual form. Texts that were read before are not split into tokens."""
        name, type_text, text = match.groups()
        cursor, known = self.cursor, self.header.known
        type = known.get(type_text)
        if type is None:
            cursor.open(number, line)
            self.name()
            read = self.header.type()
            cursor.sign("=")
            type = known.keep(type_text, (read, self.header.own_requirement(read)))
        else:
            cursor.begin(number, line)
            self.check_name(name)
        definition = _definitions.get(text)
        if definition is None:
            if not cursor.follows():
                cursor.open(number, line, match.start(3))
            definition = self.definition()
            cursor.close()
            if stays(definition[0]):
                _definitions.keep(text, definition)
        self.values.make(name, *type, *definition)

    def any_value_line(self) -> None:
        """Read the line of a value, token by token."""
        name = self.name()
        type = self.header.type()
        self.cursor.sign("=")
        self.values.make(name, type, self.header.own_requirement(type), *self.definition())

    def name(self) -> str:
        name = self.cursor.word()
        self.check_name(name)
        self.cursor.sign(":")
        return name

    def check_name(self, name: str) -> None:
        if name in self.values.nodes:
            raise self.cursor.error(f"the value {name} is made twice")
        if name in RESERVED or "." in name or ":" in name:
            raise self.cursor.error(f"{name!r} cannot name a value; it has a meaning of its own")
        if not can_name(name):
            raise self.cursor.error(
                f"FX does not accept {name!r} as a name; a trailing underscore and a number make it one"
            )

    def definition(self) -> tuple[Definition, Issue]:
        return read_definition(self.cursor), read_issue(self.cursor)
