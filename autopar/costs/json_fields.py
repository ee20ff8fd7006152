"""Read the fields of JSON files by tables of readers; an error names the field at fault, and the value it needs.

A reader is a function of a value and the name of its field. It returns the parsed value, or raises ``Malformed``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.errors import shown
from autopar.ir.mesh import MOST_RANKS

HIGHEST = 1e30  # prices of tensors are then nanoseconds that sums of integers can hold

Reader = Callable[[Any, str], Any]  # (value, the field's name) → the parsed value


class Malformed(Exception):
    """A field is missing or has a wrong value."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field.lstrip('.')}: {why}")


def fields_of(value: Any, at: str, optional: Mapping[str, Any] | None = None, **readers: Reader) -> dict[str, Any]:
    """Read the fields of an object, each by its reader.

    Args:
        at: the name of the object in errors.
        optional: field → its default; the others are required.

    Raises:
        Malformed: a field is missing, unknown, or has a wrong value.
    """
    if not isinstance(value, dict):
        raise Malformed(at, f"an object is wanted, not {shown(value)}")
    for name in value:
        if name not in readers:
            raise Malformed(f"{at}.{name}", f"there is no such field; there are {', '.join(readers)}")
    fields, defaults = {}, optional or {}
    for name, read in readers.items():
        if name not in value and name not in defaults:
            raise Malformed(f"{at}.{name}", "missing")
        fields[name] = read(value[name], f"{at}.{name}") if name in value else defaults[name]
    return fields


def text(value: Any, at: str) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise Malformed(at, f"a string is wanted, not {shown(value)}")
    return value


def one_of(names: Sequence[str]) -> Reader:
    """Read one of the given strings."""

    def read(value: Any, at: str) -> str:
        if value not in names:
            raise Malformed(at, f"{shown(value)} is none of {', '.join(names)}")
        return value

    return read


def whole(least: int, most: int = MOST_RANKS, of: str = "machines") -> Reader:
    """Read an integer between bounds. ``of`` says in errors whose range they are."""

    def read(value: Any, at: str) -> int:
        if type(value) is not int or value < least:
            raise Malformed(at, f"an integer ≥ {least} is wanted, not {shown(value)}")
        if value > most:
            raise Malformed(at, f"{shown(value)} is out of the range of {of}, {least} to {most:,}")
        return value

    return read


def number(positive: bool, least: float = 0.0, most: float = HIGHEST, of: str = "machines") -> Reader:
    """Read a number between bounds. ``positive``: whether 0 is refused; ``of`` as in ``whole``."""

    def read(value: Any, at: str) -> float:
        if type(value) not in (int, float) or not (value > 0 if positive else value >= 0) or value == math.inf:
            raise Malformed(at, f"a number {'>' if positive else '≥'} 0 is wanted, not {shown(value)}")
        if not least <= value <= most:
            raise Malformed(at, f"{shown(value)} is out of the range of {of}, {least:g} to {most:g}")
        return float(value)

    return read


def array(read: Reader) -> Reader:
    """Read a list whose items have one reader."""

    def read_all(value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            raise Malformed(at, f"a list is wanted, not {shown(value)}")
        return [read(item, f"{at}[{k}]") for k, item in enumerate(value)]

    return read_all


def mapping(read: Reader) -> Reader:
    """Read an object with any names, whose values have one reader."""

    def read_all(value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Malformed(at, f"an object is wanted, not {shown(value)}")
        return {name: read(item, f"{at}.{name}") for name, item in value.items()}

    return read_all
