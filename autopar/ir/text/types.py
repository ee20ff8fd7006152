"""Read the types of values: ``f32[32/dp (4 128/tp)] +max:tp @s1``."""

from __future__ import annotations

import math

import torch

from autopar.ir.layout import UNDECIDED, Axes, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import DTYPES, TensorType, ValueType
from autopar.ir.text.tokens import Cursor


class TypeReader(Cursor):
    """A cursor that knows the header: the level of the text, and the mesh and stages that a Layout may use."""

    def __init__(self) -> None:
        super().__init__()
        self.level = ""
        self.mesh: Mesh | None = None
        self.stages: dict[str, Mesh] = {}

    @property
    def has_uses(self) -> bool:
        """Whether every value has a Layout and every use a requirement."""
        return self.level in ("placed", "explicit")

    @property
    def may_require(self) -> bool:
        """Whether a use may have a requirement; in a traced program, a dtype."""
        return self.has_uses or self.level == "traced"

    def type(self) -> ValueType:
        if self.skip("None"):
            return None
        if self.peek("("):
            return tuple(self.sequence("(", ")", self.type))
        dtype = self.dtype()
        shape, layout = self.placed()
        return TensorType(shape, dtype, layout)

    def dtype(self) -> torch.dtype:
        name = self.word()
        if name not in DTYPES:
            raise self.error(f"no dtype {name!r}; dtypes are {', '.join(DTYPES)}")
        return DTYPES[name]

    def placed(self) -> tuple[tuple[int, ...], Layout | None]:
        """Read the dims in brackets, the pending axes and the stage; with a Layout if the level or the text has one."""
        self.sign("[")
        rows: list[list[tuple[int, Axes]]] = []
        while not self.skip("]"):
            if not self.skip("("):
                rows.append([self.part()])
                continue
            rows.append([])
            while not self.skip(")"):
                rows[-1].append(self.part())
            if len(rows[-1]) < 2:
                raise self.error("a merged dim has two parts or more, as in (4/dp 128)")
        pending: dict[str, str] = {}
        while self.skip("+"):
            axis, kind = self.word(), "sum"
            if self.skip(":"):
                axis, kind = self.word(), axis
            if axis in pending:
                raise self.error(f"the value is pending twice over {axis}")
            pending[axis] = kind
        stage = self.word() if self.skip("@") else None
        if stage is not None and stage not in self.stages:
            raise self.error(f"there is no stage {stage!r}; stages are {', '.join(self.stages) or 'none'}")
        shape = tuple(math.prod(size for size, _ in row) for row in rows)
        dims = tuple(tuple(row) if len(row) > 1 else ((None, row[0][1]),) for row in rows)
        attr = DistAttr(dims, tuple(sorted(pending.items())))
        bare = attr.is_replicated and stage is None
        if self.level in ("local", "scheduled") and not bare:
            raise self.error(f"a {self.level} program has the sizes of one rank, without '/axis', '+axis' or '@stage'")
        if bare and not self.has_uses:
            return shape, None
        return shape, self.layout(attr, shape, self.mesh if stage is None else self.stages[stage])

    def layout(self, attr: DistAttr, shape: tuple[int, ...], mesh: Mesh | None) -> Layout:
        if mesh is None:
            raise self.error("a value is placed, but the header names no mesh, as in 'on dp=2 tp=2'")
        axes = attr.axes
        try:
            for axis in axes:
                if axis != UNDECIDED:
                    mesh.check_axis(axis)
        except ValueError as error:
            raise self.error(str(error)) from None
        return Layout(mesh, attr if UNDECIDED in axes else attr.normalize(shape, mesh))

    def part(self) -> tuple[int, Axes]:
        size = self.integer()
        if size < 0:
            raise self.error(f"a size is at least 0, not {size}")
        axes = []
        while self.skip("/"):
            axes.append(UNDECIDED if self.skip(UNDECIDED) else self.word())
        return size, tuple(axes)
