"""Read a mesh that a job may run on: ``dp=2,tp=2``, or ``dp=*,tp=2`` for as many ranks as there are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import shown
from autopar.ir.mesh import Mesh

OPEN = "*"


@dataclass(frozen=True)
class Pattern:
    """The axes of an allowed mesh, of which one may be open: its size follows from the number of ranks.

    Attributes:
        axes: name → size; ``None`` for the open axis.
    """

    axes: tuple[tuple[str, int | None], ...]

    def __str__(self) -> str:
        return ",".join(f"{axis}={OPEN if size is None else size}" for axis, size in self.axes)

    @property
    def fixed(self) -> int:
        """The product of the sizes that are given."""
        return math.prod(size for _, size in self.axes if size is not None)

    @property
    def is_open(self) -> bool:
        return any(size is None for _, size in self.axes)

    @property
    def ranks(self) -> str:
        """The numbers of ranks that it fits, in words."""
        return (
            f"{'multiples of ' if self.fixed > 1 else 'any number of '}{self.fixed}"
            if self.is_open
            else f"{self.fixed}"
        )

    def mesh(self, ranks: int) -> Mesh | None:
        """Return the mesh of so many ranks, or ``None`` if there is none."""
        if self.is_open:
            return None if ranks % self.fixed else Mesh({a: size or ranks // self.fixed for a, size in self.axes})
        return Mesh({axis: size for axis, size in self.axes if size is not None}) if ranks == self.fixed else None


def pattern_of(given: str | Mesh) -> Pattern:
    """Read a mesh, or its text.

    Raises:
        TypeError: it is neither.
        ValueError: the text is no list of different axes with their sizes, or leaves two sizes open.
    """
    if isinstance(given, Mesh):
        return Pattern(tuple(given.axes))
    if not isinstance(given, str):
        raise TypeError(
            f"{shown(given)} is neither a Mesh nor its text; write an allowed mesh as in 'dp=2,tp=2', or 'dp=*,tp=2' "
            f"for any number of ranks"
        )
    axes: dict[str, int | None] = {}
    for part in given.split(","):
        axis, _, size = (word.strip() for word in part.partition("="))
        if not axis.isidentifier() or axis in axes or not (size == OPEN or size.isdecimal()):
            raise ValueError(
                f"{given!r} is not a list of different axes with their sizes; write it as in 'dp=2,tp=2', or "
                f"'dp=*,tp=2' for any number of ranks"
            )
        axes[axis] = None if size == OPEN else int(size)
    if list(axes.values()).count(None) > 1:
        raise ValueError(f"{given!r} leaves two sizes open, so no mesh follows; write one {OPEN} at most")
    Mesh({axis: 1 if size is None else size for axis, size in axes.items()})  # which checks names and sizes
    return Pattern(tuple(axes.items()))
