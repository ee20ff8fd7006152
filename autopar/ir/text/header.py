"""Read the lines above the values: level, mesh, stages and streams; and resolve the types that refer to them."""

from __future__ import annotations

from functools import lru_cache

from sympy import Symbol

from autopar.ir.layout import UNDECIDED, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program_data import LEVELS
from autopar.ir.record import Requirement, TensorType, ValueType
from autopar.ir.sizes import Values, symbol
from autopar.ir.text.memo import Memo
from autopar.ir.text.tokens import Cursor
from autopar.ir.text.types import Placed, read_dtype, read_placed


class Header:
    """What the first lines of a text say.

    Attributes:
        known: the text of a type → the type, and the requirement of a use that asks for nothing else. Programs with
            equal headers share it.
    """

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.level = ""
        self.mesh: Mesh | None = None
        self.stages: dict[str, Mesh] = {}
        self.streams: list[str] = []
        self.sizes: Values = {}
        self.coordinates: dict[str, int] | None = None
        self.known: Memo[tuple[ValueType, Requirement | None]] = Memo()

    @property
    def has_uses(self) -> bool:
        """Whether every value has a Layout and every use a requirement."""
        return self.level in ("placed", "explicit")

    @property
    def may_require(self) -> bool:
        """Whether a use may have a requirement; in a traced program, a dtype."""
        return self.has_uses or self.level == "traced"

    # -- lines ---------------------------------------------------------------------------------------------------------

    def program_line(self) -> None:
        cursor = self.cursor
        cursor.word("program")
        level = cursor.word()
        if level not in LEVELS:
            raise cursor.error(f"no level {level!r}; levels are {', '.join(LEVELS)}")
        self.level = level
        if cursor.peek("on"):
            self.mesh = self._mesh(None)
        if cursor.skip("at"):
            self.coordinates = self._pairs()
        self._recall()

    def sizes_line(self) -> None:
        """Read the values of symbols in the call that was captured: ``sizes s0=8 s1=64``."""
        self.cursor.word("sizes")
        self.sizes = {symbol(name): value for name, value in self._pairs("size").items()}
        self._recall()

    def stage_line(self) -> None:
        self.cursor.word("stage")
        name = self.cursor.word()
        if name in self.stages:
            raise self.cursor.error(f"the stage {name} is named twice")
        self.stages[name] = self._mesh(name)
        self._recall()

    def stream_line(self) -> None:
        self.cursor.word("stream")
        name = self.cursor.word()
        if name in self.streams:
            raise self.cursor.error(f"the stream {name} is named twice")
        self.streams.append(name)

    def _recall(self) -> None:
        self.known = types_under(self.level, self.mesh, tuple(self.stages.items()), tuple(self.sizes.items()))

    def _mesh(self, name: str | None) -> Mesh:
        cursor = self.cursor
        cursor.word("on")
        axes, ranks = self._pairs(), None
        if not axes and cursor.skip("("):  # one rank, as in "on () ranks 3"
            cursor.sign(")")
        if cursor.skip("ranks"):
            ranks = []
            while cursor.kind() == "number":
                ranks.append(cursor.integer())
        try:
            return Mesh(axes, ranks=ranks, name=name)
        except ValueError as error:
            raise cursor.error(str(error)) from None

    def _pairs(self, kind: str = "axis") -> dict[str, int]:
        cursor, pairs = self.cursor, {}
        while cursor.kind() == "word" and cursor.look(1) == "=":
            axis = cursor.word()
            if axis in pairs:
                raise cursor.error(f"the {kind} {axis} is named twice")
            cursor.sign("=")
            pairs[axis] = cursor.integer()
        return pairs

    # -- types ---------------------------------------------------------------------------------------------------------

    def type(self) -> ValueType:
        """Read a type."""
        cursor = self.cursor
        if cursor.skip("None"):
            return None
        if cursor.peek("("):
            return tuple(cursor.sequence("(", ")", self.type))
        dtype = read_dtype(cursor)
        shape, layout = self.resolve(read_placed(cursor))
        return TensorType(shape, dtype, layout)

    def resolve(self, placed: Placed) -> tuple[tuple[int, ...], Layout | None]:
        """Return the shape, and the Layout if the level or the text has one."""
        placed = placed.at(self.cursor, self.sizes)
        shape, attr, stage = placed.shape, placed.attr, placed.stage
        if stage is not None and stage not in self.stages:
            raise self.cursor.error(f"there is no stage {stage!r}; stages are {', '.join(self.stages) or 'none'}")
        bare = attr.is_replicated and stage is None
        if self.level in ("local", "scheduled") and not bare:
            raise self.cursor.error(
                f"a {self.level} program has the sizes of one rank, without '/axis', '+axis' or '@stage'"
            )
        if bare and not self.has_uses:
            return shape, None
        return shape, self._layout(attr, shape, self.mesh if stage is None else self.stages[stage])

    def _layout(self, attr: DistAttr, shape: tuple[int, ...], mesh: Mesh | None) -> Layout:
        if mesh is None:
            raise self.cursor.error("a value is placed, but the header names no mesh, as in 'on dp=2 tp=2'")
        axes = attr.axes
        try:
            for axis in axes:
                if axis != UNDECIDED:
                    mesh.check_axis(axis)
        except ValueError as error:
            raise self.cursor.error(str(error)) from None
        return Layout(mesh, attr if UNDECIDED in axes else attr.normalize(shape, mesh))

    def own_requirement(self, type: ValueType) -> Requirement | None:
        """Return the requirement of a use that asks for what the value is."""
        if not self.has_uses or not isinstance(type, TensorType) or type.layout is None:
            return None
        return Requirement(type.layout, type.dtype)


@lru_cache(maxsize=64)
def types_under(
    level: str, mesh: Mesh | None, stages: tuple[tuple[str, Mesh], ...], sizes: tuple[tuple[Symbol, int], ...]
) -> Memo[tuple[ValueType, Requirement | None]]:
    """Return what was read under equal headers before."""
    return Memo()
