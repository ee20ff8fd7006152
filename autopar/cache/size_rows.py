"""Write sizes as JSON, and read them back: a number as it is, and one that follows from symbols with its expression.

8                                8
s0*s1, captured as 8 × 64        ["z", "s0*s1", [["s0", 8], ["s1", 64]]]
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from autopar.ir.sizes import Size, Values, expression_text, read_size, symbol

SIZE = "z"


def size_row(size: Any) -> Any:
    """Return a size as JSON; anything else as it is."""
    if size.__class__ is not Size:
        return size
    return [SIZE, expression_text(size.expression), [[str(each), value] for each, value in size.values.items()]]


def size_of(row: Any) -> Any:
    """Return the size of a row. ``ValueError`` if it is none."""
    if row.__class__ is not list:
        return row
    kind, text, values = row
    if kind != SIZE:
        raise ValueError(f"{kind!r} begins no size")
    return _size(text, tuple(map(tuple, values)))


@lru_cache(maxsize=4096)
def _size(text: str, values: tuple[tuple[str, int], ...]) -> int:
    return read_size(text, _values(values))


@lru_cache(maxsize=256)
def _values(values: tuple[tuple[str, int], ...]) -> Values:
    """Sizes of one call share their values."""
    found: Mapping[Any, int] = {symbol(name): value for name, value in values}
    return found
