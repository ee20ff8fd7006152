"""Read the text after ``=`` on the line of a value. Nothing here depends on other lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from autopar.ir import transfers
from autopar.ir.record import ROLES
from autopar.ir.text.overloads import misplaced
from autopar.ir.text.tokens import WORDS, Cursor
from autopar.ir.text.types import Placed, read_dtype, read_placed
from autopar.torch_private import OpOverload, find_op


@dataclass(frozen=True, slots=True)
class Need:
    """What a use requires: a dtype, a Layout, or both."""

    dtype: torch.dtype | None
    placed: Placed | None


@dataclass(frozen=True, slots=True)
class Operand:
    """The use of a value, by name."""

    name: str
    need: Need | None = None


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A role, and in parentheses the next value of a state, a tangent's position or the user's name."""

    role: str
    after: str = ""
    index: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Content:
    """The elements of a constant, or their hash."""

    content: object


@dataclass(frozen=True, slots=True)
class Element:
    """One of several results of an op."""

    source: Operand
    index: int


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an op or transfer.

    Attributes:
        args, kwargs: with ``Operand`` in place of values.
        operands: all of them, in order.
        started: whether the collective is only started.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Operand, ...]
    started: bool


Definition = Placeholder | Content | Element | OpCall


class Issue(NamedTuple):
    """Where an op is issued: its stream, and the message and elements of a collective that is started."""

    stream: str | None = None
    message: str = ""
    span: tuple[int, int] | None = None


NOWHERE = Issue()


@dataclass(slots=True)
class _Reader:
    """Reads one definition.

    Attributes:
        operands: those read so far.
    """

    cursor: Cursor
    operands: list[Operand] = field(default_factory=list)

    def definition(self) -> Definition:
        cursor = self.cursor
        if cursor.look() in ROLES and (cursor.look(1) in ("(", "on") or cursor.at + 1 == len(cursor.tokens)):
            return self.placeholder()
        if cursor.skip("constant"):
            cursor.sign("(")
            content = _tuples(cursor.literal())
            cursor.sign(")")
            return Content(content)
        if cursor.kind() == "word" and cursor.look(1) == "[":
            return self.element()
        started = cursor.look(1) not in ("(", "") and cursor.skip("start")
        target = _target(cursor.word())
        if target is None:
            name = cursor.tokens[cursor.at - 1].text
            raise cursor.error(f"no op or transfer {name!r}; ops print as 'mm', 'add.Tensor' or 'library::op'")
        return self.call(target, started)

    def placeholder(self) -> Placeholder:
        cursor = self.cursor
        role, after, index, name = cursor.word(), "", None, ""
        if cursor.skip("("):
            if cursor.kind() == "word":
                after = cursor.word()
            elif cursor.kind() == "number":
                index = cursor.integer()
            if index is not None or after:
                cursor.skip(",")
            if cursor.kind() == "string":
                name = cursor.string()
            cursor.sign(")")
        if (role == "state") != bool(after):
            raise cursor.error(
                "a state names the value that replaces it, as in 'state(next)'; other placeholders do not"
            )
        if (role == "tangent") != (index is not None):
            raise cursor.error(
                "a tangent names the position of its value among those returned, as in 'tangent(0)'; other "
                "placeholders do not"
            )
        return Placeholder(role, after, index, name)

    def element(self) -> Element:
        cursor, source = self.cursor, self.operand()
        cursor.sign("[")
        index = cursor.integer()
        cursor.sign("]")
        return Element(source, index)

    def call(self, target: Any, started: bool) -> OpCall:
        transfer = target in transfers.BY_FUNCTION
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        cursor = self.cursor

        def read_argument() -> None:
            if cursor.kind() == "word" and cursor.look(1) == "=":
                key = cursor.word()
                if key in kwargs:
                    raise cursor.error(f"the argument {key} is given twice")
                cursor.sign("=")
                kwargs[key] = cursor.literal(bare=True) if transfer else self.argument()
            elif kwargs:
                raise cursor.error("arguments by position come before those by name")
            else:
                args.append(cursor.literal(bare=True) if transfer and args else self.argument())

        cursor.sequence("(", ")", read_argument)
        if transfer:
            self.check_transfer(target, args, kwargs)
        elif wrong := misplaced(target, args, kwargs, Operand):
            raise cursor.error(wrong)
        return OpCall(target, tuple(args), kwargs, tuple(self.operands), started)

    def check_transfer(self, function: Callable[..., Any], args: list[Any], kwargs: Mapping[str, Any]) -> None:
        name = function.__name__
        takes_none = function is transfers.recv and args and args[0] is None  # on the ranks of the target alone
        if function is transfers.join_chunks:
            if not args or not isinstance(args[0], list) or not all(isinstance(chunk, Operand) for chunk in args[0]):
                raise self.cursor.error(f"{name} takes a list of chunks first, as in {name}([x_0, x_1])")
        elif not takes_none and (not args or not isinstance(args[0], Operand)):
            raise self.cursor.error(f"{name} takes a value first, as in {name}(x)")
        try:
            _signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise self.cursor.error(f"{name}: {error}") from None

    def argument(self) -> Any:
        cursor = self.cursor
        if cursor.kind() == "word" and cursor.look() not in WORDS and cursor.look(1) != "(":
            return self.operand()
        if cursor.peek("["):
            return cursor.sequence("[", "]", self.argument)
        if cursor.peek("("):
            return tuple(cursor.sequence("(", ")", self.argument))
        return cursor.literal()

    def operand(self) -> Operand:
        operand = read_operand(self.cursor)
        self.operands.append(operand)
        return operand


def read_definition(cursor: Cursor) -> Definition:
    return _Reader(cursor).definition()


def read_issue(cursor: Cursor) -> Issue:
    """Read ``on dp in dp_0 from 0 to 4096``, of which each part may be absent."""
    if not cursor.skip("on"):
        return NOWHERE
    stream = cursor.word()
    message = cursor.word() if cursor.skip("in") else ""
    if not cursor.skip("from"):
        return Issue(stream, message)
    begin = cursor.integer()
    if not cursor.skip("to"):
        raise cursor.error("a chunk names its first element and the one behind its last, as in 'from 0 to 4096'")
    return Issue(stream, message, (begin, cursor.integer()))


def stays(definition: Definition) -> bool:
    """Whether the same text always means this. An op of a user's library may be registered anew."""
    target = definition.target if isinstance(definition, OpCall) else None
    return not isinstance(target, OpOverload) or target.namespace in ("aten", "autopar")


def read_operand(cursor: Cursor) -> Operand:
    name = cursor.word()
    if not cursor.skip("as"):
        return Operand(name)
    dtype = read_dtype(cursor) if cursor.kind() == "word" else None
    placed = read_placed(cursor) if dtype is None or cursor.peek("[") else None
    return Operand(name, Need(dtype, placed))


def _target(name: str) -> Any:
    """Return the op or transfer of a name; ``None`` if there is none."""
    if name in transfers.TRANSFERS:
        return transfers.TRANSFERS[name].function
    return find_op(name)


_signature = cache(inspect.signature)


def _tuples(value: object) -> object:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
