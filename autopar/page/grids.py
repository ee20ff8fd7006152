"""Describe how a value lies on the ranks of a mesh, in the form in which the page draws a small grid of ranks."""

from __future__ import annotations

from typing import Any

from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type


class Grids:
    """Number the types of values, so that each is written once.

    Attributes:
        rows: for each type its text, the axes of the mesh, the axes that split it, and those over which it is a partial
            sum or maximum.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._numbers: dict[TensorType, int] = {}

    def __call__(self, type: TensorType | None) -> int | None:
        """Return the number of a type."""
        if type is None:
            return None
        if type not in self._numbers:
            self._numbers[type] = len(self.rows)
            attr = type.attr
            self.rows.append({
                "text": print_type(type),
                "mesh": [] if type.layout is None else [list(axis) for axis in type.layout.mesh.axes],
                "split": [axis for dim in attr.dims for _, axes in dim for axis in axes],
                "pending": [axis for axis, _ in attr.pending],
            })  # fmt: skip
        return self._numbers[type]
