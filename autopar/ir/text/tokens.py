"""Split a line of the text into tokens, and read them from left to right."""

from __future__ import annotations

import ast
import builtins
import keyword
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autopar.errors import TextError
from autopar.ir.record import DTYPE_NAMES, PHASES


class SizeText(NamedTuple):
    """A size in braces, as it is written; the header of the program gives its symbols values."""

    text: str


LITERALS: dict[Any, str] = {
    None: "None",
    True: "True",
    False: "False",
    **DTYPE_NAMES,
    torch.strided: "strided",
    torch.sparse_coo: "sparse_coo",
    torch.contiguous_format: "contiguous_format",
    torch.preserve_format: "preserve_format",
    torch.channels_last: "channels_last",
    torch.channels_last_3d: "channels_last_3d",
}
WORDS: dict[str, Any] = {text: value for value, text in LITERALS.items()} | {"inf": math.inf, "nan": math.nan}
RESERVED = frozenset(WORDS) | {
    "device", "complex", "constant", "start", "as", "on", "return", "grad", "state", *PHASES,
}  # fmt: skip
_FX_RENAMES = frozenset({*keyword.kwlist, *dir(builtins), "NoneType", "torch", "fx_pytree", "pytree"})

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<number>-?\d+\.?\d*(?:e[+-]?\d+)?|-inf\b)
    |(?P<word>[^\W\d]\w*(?:::\w+)?(?:\.\w+)*)
    |(?P<sign>[\[\](){},:=/+@?*%-]))""",
    re.VERBOSE,
)


def can_name(name: str) -> bool:
    """Return whether a value may have this name: neither the grammar nor FX has another meaning for it."""
    return _NAME.fullmatch(name) is not None and name not in RESERVED and name not in _FX_RENAMES


def legal_name(text: str) -> str:
    """Replace the characters of ``text`` that an identifier cannot have.

    With a number appended it is always a legal name.
    """
    legal = re.sub(r"\W", "_", text, flags=re.ASCII)
    return f"_{legal}" if not legal or legal[0].isdigit() else legal


class Token(NamedTuple):
    """One token; ``kind`` is ``string``, ``number``, ``word`` or ``sign``."""

    kind: str
    text: str
    start: int
    end: int


class Cursor:
    """Read the tokens of one line. Every error gives the line's number, says what is wrong and quotes the line."""

    def __init__(self) -> None:
        self.number = 0
        self.line = ""
        self.tokens: list[Token] = []
        self.at = 0

    def open(self, number: int, line: str, start: int = 0) -> None:
        """Split a line into tokens, from a position on; a comment ends it."""
        self.number, self.line, self.tokens, self.at = number, line, [], 0
        position = start
        for match in _TOKEN.finditer(line, start):
            if match.start() != position:
                break
            kind = match.lastgroup or ""
            position = match.end()
            self.tokens.append(Token(kind, match[kind], match.start(kind), position))
        rest = line[position:].lstrip()
        if rest and not rest.startswith("#"):
            raise self.error(f"{rest.rstrip()[:12]!r} is not part of the grammar")

    def begin(self, number: int, line: str) -> None:
        """Go to a line that was read before, so that errors quote it."""
        self.number, self.line, self.tokens, self.at = number, line, [], 0

    def close(self) -> None:
        """Check that the whole line has been read."""
        if self.at < len(self.tokens):
            raise self.error(f"{self.tokens[self.at].text!r} is left over")

    # -- looking -------------------------------------------------------------------------------------------------

    def follows(self) -> bool:
        """Return whether the line goes on."""
        return self.at < len(self.tokens)

    def kind(self) -> str:
        """Return the kind of the next token; "" at the end of the line."""
        return self.tokens[self.at].kind if self.at < len(self.tokens) else ""

    def look(self, ahead: int = 0) -> str:
        """Return the text of the next token, or of one further ahead; "" at the end of the line and for strings."""
        token = self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else None
        return "" if token is None or token.kind == "string" else token.text

    def peek(self, token: str) -> bool:
        return self.look() == token

    # -- taking --------------------------------------------------------------------------------------------------

    def take(self, kind: str) -> str:
        if self.kind() != kind:
            raise self.expected(f"a {kind}")
        self.at += 1
        return self.tokens[self.at - 1].text

    def word(self, expected: str = "") -> str:
        if expected and not self.peek(expected):
            raise self.expected(repr(expected))
        return self.take("word")

    def sign(self, expected: str) -> None:
        if not self.peek(expected):
            raise self.expected(repr(expected))
        self.at += 1

    def skip(self, token: str) -> bool:
        """Take ``token`` if it is next."""
        is_next = self.peek(token)
        self.at += is_next
        return is_next

    def integer(self) -> int:
        token = self.take("number")
        if not token.lstrip("-").isdecimal():
            raise self.error(f"expected an integer, found {token!r}")
        return int(token)

    def string(self) -> str:
        token = self.take("string")
        try:
            return ast.literal_eval(token)
        except (SyntaxError, ValueError):
            raise self.error(f"{token} is no Python string") from None

    def braced(self) -> SizeText:
        """Read a size in braces: ``{s0 + 1}``."""
        begin = self.tokens[self.at].end
        self.sign("{")
        while self.follows() and not self.peek("}"):
            self.at += 1
        self.sign("}")
        return SizeText(self.line[begin : self.tokens[self.at - 1].start].strip())

    def size(self) -> int | SizeText:
        """Read the size of a part of a dim: ``32``, ``s0``, ``2*s0*s1``, ``{s0 + 1}``."""
        if self.peek("{"):
            return self.braced()
        if self.kind() != "word" and self.look(1) != "*":
            return self.integer()
        factors = [self.factor()]
        while self.skip("*"):
            factors.append(self.factor())
        return SizeText("*".join(factors))

    def factor(self) -> str:
        return str(self.integer()) if self.kind() == "number" else self.word()

    def sequence(self, left: str, right: str, read_item: Callable[[], Any]) -> list[Any]:
        """Read items with ``read_item`` between ``left`` and ``right``, separated by commas."""
        self.sign(left)
        items = []
        while not self.peek(right):
            items.append(read_item())
            if not self.peek(right):
                self.sign(",")
        self.sign(right)
        return items

    def literal(self, bare: bool = False) -> Any:
        """Read a scalar, or a list or tuple of scalars; with ``bare``, other words are strings."""
        if self.peek("["):
            return self.sequence("[", "]", lambda: self.literal(bare))
        if self.peek("("):
            return tuple(self.sequence("(", ")", lambda: self.literal(bare)))
        if self.peek("{"):
            return self.braced()
        if self.kind() == "string":
            return self.string()
        if self.kind() == "number":
            token = self.take("number")
            return int(token) if token.lstrip("-").isdecimal() else float(token)
        if self.look(1) == "(" and self.look() in ("device", "complex"):
            kind = self.word()
            args = self.sequence("(", ")", self.literal)
            try:
                return torch.device(*args) if kind == "device" else complex(*args)
            except (TypeError, RuntimeError) as error:
                raise self.error(f"no {kind}: {str(error).splitlines()[0]}") from None
        if self.kind() == "word" and (bare or self.look() in WORDS):
            word = self.word()
            return WORDS.get(word, word)
        raise self.expected("a scalar")

    # -- errors --------------------------------------------------------------------------------------------------

    def expected(self, description: str) -> TextError:
        if self.at < len(self.tokens):
            return self.error(f"expected {description}, found {self.tokens[self.at].text!r}")
        return self.error(f"the line ends where {description} is expected")

    def error(self, message: str, where: tuple[int, str] | None = None) -> TextError:
        number, line = where or (self.number, self.line)
        return TextError(f"line {number}: {message}\n    {line.strip()}")
