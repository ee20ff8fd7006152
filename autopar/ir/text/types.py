"""Read the types of values as they are written: ``f32[32/dp (4 128/tp)] +max:tp @s1``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from autopar.ir.layout import UNDECIDED, Axes, DistAttr
from autopar.ir.record import DTYPES
from autopar.ir.text.tokens import Cursor


class Placed(NamedTuple):
    """What follows a dtype: the dims in brackets, the pending axes and the stage, as written."""

    shape: tuple[int, ...]
    attr: DistAttr
    stage: str | None


def read_dtype(cursor: Cursor) -> torch.dtype:
    name = cursor.word()
    if name not in DTYPES:
        raise cursor.error(f"no dtype {name!r}; dtypes are {', '.join(DTYPES)}")
    return DTYPES[name]


def read_placed(cursor: Cursor) -> Placed:
    rows = _dims(cursor)
    pending = _pending(cursor)
    stage = cursor.word() if cursor.skip("@") else None
    shape = tuple(math.prod(size for size, _ in row) for row in rows)
    dims = tuple(tuple(row) if len(row) > 1 else ((None, row[0][1]),) for row in rows)
    return Placed(shape, DistAttr(dims, tuple(sorted(pending.items()))), stage)


def _dims(cursor: Cursor) -> list[list[tuple[int, Axes]]]:
    cursor.sign("[")
    rows: list[list[tuple[int, Axes]]] = []
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


def _part(cursor: Cursor) -> tuple[int, Axes]:
    size = cursor.integer()
    if size < 0:
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
