"""Give the layouts of a plan to the values of another capture of its program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar.capture.decompose.expanded import expansion_of, refs
from autopar.capture.decompose.expansions import opened_factors
from autopar.errors import PlanError, shown
from autopar.ir.layout import DistAttr, layout_of
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, name_of, operands, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType, ValueType, requirement_of
from autopar.ir.text.tokens import Cursor
from autopar.ir.text.types import read_placed
from autopar.plan.boundary import required_dtypes
from autopar.search.problem.strategies import StepLayouts
from autopar.search.solutions.planned import Planned
from autopar.search.solutions.solution import Solution
from autopar.search.solutions.value_names import OUTPUT, value_names
from autopar.search.solutions.written import operand_types, type_of


def applied(
    solution: Solution, program: Program
) -> tuple[
    dict[fx.Node, ValueType], dict[fx.Node, tuple[Requirement | None, ...]], dict[fx.Node, tuple[StepLayouts, ...]]
]:
    """Return the types and uses of a traced program, as a solution gives them to its values, and of its expanded ops
    the layouts of their expansions.

    Raises:
        PlanError: the solution is of another program or mesh; the error says what differs.
    """
    mesh = program.mesh
    assert mesh is not None
    if mesh.axes != solution.mesh.axes:
        raise PlanError(f"the plan is for the mesh ({solution.mesh}), and this one is ({mesh}); search a plan for it")
    names = value_names(program)
    if different := sorted(set(names.values()) ^ solution.values.keys()):
        some = ", ".join(different[:4]) + ", …" * (len(different) > 4)
        raise PlanError(
            f"the plan is of another program: {len(different)} values are in only one of the two: {some}; search a "
            f"plan for this one"
        )
    reader = _LayoutReader(mesh)
    types: dict[fx.Node, ValueType] = {}
    uses: dict[fx.Node, tuple[Requirement | None, ...]] = {}
    inside: dict[fx.Node, tuple[StepLayouts, ...]] = {}
    for node in program.nodes:
        record = record_of(node)
        if is_getitem(node):
            source, index = node.args[0], node.args[1]
            parts = types[source]  # type: ignore[index]
            assert isinstance(parts, tuple) and isinstance(index, int)
            types[node], uses[node] = parts[index], (None,)
            continue
        name = names[node]
        plan = solution.values[name]
        values = [reader.part(record_of(operand).type) for operand in operands(node)]
        type = record.type
        parts = type if isinstance(type, tuple) else (type,)
        if name == OUTPUT:
            types[node] = None
        else:
            placed = tuple(reader.placed(name, part, text) for part, text in _pairs(name, parts, plan.gives))
            types[node] = placed if isinstance(type, tuple) else placed[0]
        if plan.inside:
            inside[node] = _inside(reader, name, node, plan.inside)
            uses[node] = _uses(node, inside[node], mesh)
        elif values:
            dtypes = required_dtypes(record, values)
            attrs = [reader.attr(name, value.shape, text) for value, text in _pairs(name, values, plan.needs)]
            uses[node] = tuple(requirement_of(mesh, attr, dtype) for attr, dtype in zip(attrs, dtypes, strict=True))
    return types, uses, inside


def _inside(reader: _LayoutReader, name: str, node: fx.Node, planned: Sequence[Planned]) -> tuple[StepLayouts, ...]:
    """Return the layouts of the expansion of an op.

    Raises:
        PlanError: the op has no expansion, or another one.
    """
    if not opened_factors(node):
        raise PlanError(f"the plan has an expansion of {name}, which has none; search the plan again")
    expansion, read = expansion_of(node), operand_types(node)
    found = []
    for step, plan in _pairs(f"the expansion of {name}", expansion.steps, planned):
        parts = step.type if isinstance(step.type, tuple) else (step.type,)
        gives = tuple(reader.placed(name, part, text) for part, text in _pairs(name, parts, plan.gives))
        needs = [
            reader.attr(name, type_of(ref, expansion, read).shape, text)
            for ref, text in _pairs(name, refs(step), plan.needs)
        ]
        found.append(StepLayouts(tuple(needs), tuple(None if give is None else give.attr for give in gives)))
    return tuple(found)


def _uses(node: fx.Node, layouts: Sequence[StepLayouts], mesh: Mesh) -> tuple[Requirement | None, ...]:
    """Return what an expansion requires of the operands of its op; ``None`` for one that it does not read."""
    expansion, read = expansion_of(node), operand_types(node)
    needs: dict[int, DistAttr] = {}
    for step, each in zip(expansion.steps, layouts, strict=True):
        for ref, need in zip(refs(step), each.needs, strict=True):
            needs.setdefault(ref.step, need)
    return tuple(
        requirement_of(mesh, needs[-k - 1], type.dtype) if -k - 1 in needs else None for k, type in enumerate(read)
    )


def difference(solution: Solution, program: Program) -> str:
    """Say in what a plan's program differs from a traced one: its first values, or the shapes of some."""
    names = value_names(program)
    own = {name: node for node, name in names.items()}
    for name, node in own.items():
        planned, type = solution.values.get(name), record_of(node).type
        if planned is None:
            return f"it has no {name}"
        if isinstance(type, TensorType) and len(planned.gives) == 1 and planned.gives[0] is not None:
            shape = _shape(planned.gives[0])
            if shape is not None and shape != type.shape:
                return f"its {name} has the shape {list(shape)}, and here it is {list(type.shape)}"
    if missing := next((name for name in solution.values if name not in own), None):
        return f"here is no {missing}"
    return "its ops have other arguments or dtypes"


def _shape(text: str) -> tuple[int, ...] | None:
    """Return the global shape of a layout; ``None`` if it cannot be read."""
    cursor = Cursor()
    try:
        cursor.open(1, text)
        return read_placed(cursor).shape
    except ValueError:
        return None


def layouts_of_placeholders(solution: Solution, program: Program) -> dict[str, DistAttr]:
    """Return parameter → its layout in a plan, of the parameters of a program that the plan has in the same shape."""
    assert program.mesh is not None
    reader, names = _LayoutReader(program.mesh), value_names(program)
    found = {}
    for node in program.placeholders:
        planned = solution.values.get(names[node])
        if record_of(node).role != "param" or planned is None or not planned.gives:
            continue
        text = planned.gives[0]
        assert text is not None
        try:
            found[name_of(node)] = reader.attr(names[node], tensor_type(node).shape, text)
        except PlanError:  # of another shape
            continue
    return found


def layouts_of_states(solution: Solution, program: Program) -> dict[str, DistAttr]:
    """Return parameter → the layout of its optimizer's state, of those that a plan has chosen.

    Raises:
        PlanError: the plan has a layout of another parameter or shape.
    """
    assert program.mesh is not None
    reader = _LayoutReader(program.mesh)
    shapes = {name_of(n): tensor_type(n).shape for n in program.placeholders if record_of(n).role == "param"}
    if unknown := [name for name in solution.optimizer_states if name not in shapes]:
        raise PlanError(f"the plan has a layout of the state of {unknown[0]}, which is no parameter of this program")
    return {
        name: reader.attr(f"the state of {name}", shapes[name], text)
        for name, text in solution.optimizer_states.items()
    }


def _pairs(name: str, values: Sequence[Any], texts: Sequence[Any]) -> list[tuple[Any, Any]]:
    if len(values) != len(texts):
        raise PlanError(f"the plan has {len(texts)} layouts for {name}, which has {len(values)}; search the plan again")
    return list(zip(values, texts, strict=True))


class _LayoutReader:
    """Reads layouts from text, each text once."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[tuple[str, tuple[int, ...]], DistAttr] = {}

    def part(self, type: ValueType) -> TensorType:
        assert isinstance(type, TensorType)
        return type

    def placed(self, name: str, type: TensorType | None, text: str | None) -> TensorType | None:
        if type is None:
            return None
        if text is None:
            raise PlanError(f"the plan has no layout for {name}; search the plan again")
        return TensorType(type.shape, type.dtype, layout_of(self.mesh, self.attr(name, type.shape, text)))

    def attr(self, name: str, shape: tuple[int, ...], text: str) -> DistAttr:
        key = text, shape
        if key not in self._known:
            self._known[key] = self._read(name, shape, text)
        return self._known[key]

    def _read(self, name: str, shape: tuple[int, ...], text: str) -> DistAttr:
        cursor = Cursor()
        try:
            cursor.open(1, text)
            placed = read_placed(cursor)
            cursor.close()
        except ValueError as error:
            why = str(error).partition("\n")[0]
            raise PlanError(f"the plan's layout {shown(text)} of {name} cannot be read: {why}") from None
        if placed.shape != shape:
            raise PlanError(
                f"the plan's layout {shown(text)} of {name} is for another shape than {list(shape)}; search the plan "
                f"again"
            )
        if unknown := sorted(set(placed.attr.axes) - set(self.mesh.names)):
            raise PlanError(
                f"the plan's layout {shown(text)} of {name} has an axis {unknown[0]}, which is not on the mesh"
            )
        return placed.attr
