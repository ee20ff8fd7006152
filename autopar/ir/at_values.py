"""Make the program of other sizes: each symbol is replaced by its value there. Linear in the graph; nothing is traced.

x : f32[s0/dp s1 64]                                     x : f32[3/dp 100 64]
view : f32[(s0/dp s1) 64] = view(x, [{s0*s1}, 64])   →   view : f32[(3/dp 100) 64] = view(x, [300, 64])
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import fx

from autopar.ir.layout import UNDECIDED, DistAttr, Layout, layout_of
from autopar.ir.nodes import make_node, map_operands, operands, record_of, set_record
from autopar.ir.program_data import ProgramData
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.ir.sizes import AtValues, Size, Values

P = TypeVar("P", bound=ProgramData)


def at_values(program: P, values: Values) -> P:
    """Return a program without symbols, of the same level.

    Args:
        values: symbol → its value.

    Raises:
        ValueError: a size is no whole number at these values, or a part of a dim is below 0.
    """
    return _Substitution(program, values).run()


class _Substitution(Generic[P]):
    def __init__(self, program: P, values: Values) -> None:
        self.program, self.at = program, AtValues(values)
        self.types: dict[TensorType, TensorType] = {}
        self.nodes: dict[fx.Node, fx.Node] = {}

    def run(self) -> P:
        program, graph = self.program, fx.Graph()
        for node in program.nodes:
            args = map_operands(self.at(node.args), self.nodes.__getitem__)
            kwargs = map_operands(self.at(dict(node.kwargs)), self.nodes.__getitem__)
            self.nodes[node] = new = make_node(graph, node.name, node.op, node.target, args, kwargs)
            set_record(new, self.record(node))
        return type(program)(graph, program.level, program.mesh, stages=program.stages, streams=program.streams,
                             coordinates=program.coordinates, tree=program.tree,
                             constants=program.constants)  # fmt: skip

    def record(self, node: fx.Node) -> Record:
        record = record_of(node)
        uses = record.uses
        if any(need is not None and need.layout is not None for need in uses):
            shapes = (record_of(operand).type for operand in operands(node))
            uses = tuple(self.need(need, type) for need, type in zip(uses, shapes, strict=True))
        return record._replace(type=self.type(record.type), uses=uses)

    def type(self, type: ValueType) -> ValueType:
        if isinstance(type, tuple):
            return tuple(None if part is None else self.tensor(part) for part in type)
        return None if type is None else self.tensor(type)

    def tensor(self, type: TensorType) -> TensorType:
        known = self.types.get(type)
        if known is None:
            shape: tuple[int, ...] = tuple(map(self.at.size, type.shape))
            known = self.types[type] = TensorType(shape, type.dtype, self.layout(type.layout, shape))
        return known

    def layout(self, layout: Layout | None, shape: tuple[int, ...]) -> Layout | None:
        """Return a layout with the sizes of parts replaced, in its normal form."""
        if layout is None or not any(isinstance(size, Size) for dim in layout.attr.dims for size, _ in dim):
            return layout
        dims = tuple(tuple((self.at.size(size), axes) for size, axes in dim) for dim in layout.attr.dims)
        attr = DistAttr(dims, layout.attr.pending)
        return layout_of(layout.mesh, attr if UNDECIDED in attr.axes else attr.normalize(shape, layout.mesh))

    def need(self, need: Requirement | None, type: ValueType) -> Requirement | None:
        if need is None or need.layout is None or not isinstance(type, TensorType):
            return need
        layout = self.layout(need.layout, tuple(map(self.at.size, type.shape)))
        return need if layout is need.layout else Requirement(layout, need.dtype)
