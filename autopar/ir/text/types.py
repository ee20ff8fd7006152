"""Read the types of values as they are written: ``f32[32/dp (4 128/tp)] +max:tp @s1``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.ir.layout import UNDECIDED, Axes, DistAttr
from autopar.ir.record import DTYPES
from autopar.ir.sizes import Values, read_size
from autopar.ir.text.tokens import Cursor, SizeText

Written = int | SizeText  # a size as it is written


@dataclass(frozen=True)
class Placed:
    """What follows a dtype: the dims in brackets, the pending axes and the stage, as written."""

    dims: tuple[tuple[tuple[Written, Axes], ...], ...]
    pending: tuple[tuple[str, str], ...]
    stage: str | None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(size for size, _ in dim) for dim in self._sized)

    @cached_property
    def attr(self) -> DistAttr:
        dims = tuple(tuple(dim) if len(dim) > 1 else ((None, dim[0][1]),) for dim in self._sized)
        return DistAttr(dims, self.pending)

    @property
    def _sized(self) -> list[list[tuple[int, Axes]]]:
        """The dims; they have no symbol."""
        sized = [[(size, axes) for size, axes in dim if isinstance(size, int)] for dim in self.dims]
        assert [len(dim) for dim in sized] == [len(dim) for dim in self.dims]
        return sized

    @cached_property
    def has_symbols(self) -> bool:
        return any(isinstance(size, SizeText) for dim in self.dims for size, _ in dim)

    def at(self, cursor: Cursor, values: Values) -> Placed:
        """Return the same with the values of symbols that a header gives."""
        if not self.has_symbols:
            return self
        dims = tuple(tuple((given(cursor, size, values), axes) for size, axes in dim) for dim in self.dims)
        return Placed(dims, self.pending, self.stage)


def given(cursor: Cursor, size: Written, values: Values) -> int:
    """Return a size with the values of symbols that a header gives."""
    if isinstance(size, int):
        return size
    try:
        return read_size(size.text, values)
    except ValueError as error:
        raise cursor.error(str(error)) from None


def read_dtype(cursor: Cursor) -> torch.dtype:
    name = cursor.word()
    if name not in DTYPES:
        raise cursor.error(f"no dtype {name!r}; dtypes are {', '.join(DTYPES)}")
    return DTYPES[name]


def read_placed(cursor: Cursor) -> Placed:
    rows = _dims(cursor)
    pending = _pending(cursor)
    stage = cursor.word() if cursor.skip("@") else None
    return Placed(tuple(map(tuple, rows)), tuple(sorted(pending.items())), stage)


def _dims(cursor: Cursor) -> list[list[tuple[Written, Axes]]]:
    cursor.sign("[")
    rows: list[list[tuple[Written, Axes]]] = []
    while not cursor.skip("]"):
        if not cursor.skip("("):
            rows.append([_part(cursor)])
            continue
        rows.append([])
        while not cursor.skip(")"):
            rows[-1].append(_part(cursor))
        if len(rows[-1]) < 2:
            raise cursor.error("a merged dim has two parts or more, as in (4/dp 128)")
    return rows


def _part(cursor: Cursor) -> tuple[Written, Axes]:
    size = cursor.size()
    if isinstance(size, int) and size < 0:
        raise cursor.error(f"a size is at least 0, not {size}")
    axes = []
    while cursor.skip("/"):
        axes.append(UNDECIDED if cursor.skip(UNDECIDED) else cursor.word())
    return size, tuple(axes)


def _pending(cursor: Cursor) -> dict[str, str]:
    pending: dict[str, str] = {}
    while cursor.skip("+"):
        axis, kind = cursor.word(), "sum"
        if cursor.skip(":"):
            axis, kind = cursor.word(), axis
        if axis in pending:
            raise cursor.error(f"the value is pending twice over {axis}")
        pending[axis] = kind
    return pending
