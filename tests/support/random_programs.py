"""Random programs for property tests: anything that prints, with the literals, types and Layouts in it."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from hypothesis import strategies as st
from strategies import attrs, meshes, shapes
from torch import fx

from autopar.ir import transfers
from autopar.ir.constant import Constant
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import make_node, operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.program_data import LEVELS
from autopar.ir.record import DTYPES, PHASES, Record, Requirement, Result, TensorType, ValueType
from autopar.ir.text.overloads import misplaced
from autopar.ir.text.tokens import LITERALS, can_name

PLACED = ("placed", "explicit")
LOCAL = ("local", "scheduled")


# -- literals and types ------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(), st.sampled_from(sorted(LITERALS, key=repr)),
    st.complex_numbers(), st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-300, 1e300, 5e-324, 0.1, "it's", 'a "b" # c', "\\",
                     "\n#"]),
)  # fmt: skip
ARGUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple), max_leaves=6
)

MESHES = meshes(max_ranks=12)
KINDS = ("sum", "sum", "max", "min")


@st.composite
def layouts(draw: st.DrawFn, program: Program, shape: tuple[int, ...]) -> Layout:
    mesh = draw(st.sampled_from([program.mesh, *program.stages.values()]))
    assert mesh is not None
    return Layout(mesh, draw(attrs(mesh, shape, pending=KINDS)).normalize(shape, mesh))


@st.composite
def tensor_types(draw: st.DrawFn, program: Program) -> TensorType:
    shape = draw(shapes())
    bare = TensorType(shape, draw(st.sampled_from(sorted(DTYPES.values(), key=str))))
    if program.level in LOCAL or (program.level == "traced" and (program.mesh is None or draw(st.booleans()))):
        return bare
    layout = draw(layouts(program, shape))
    said = program.level in PLACED or layout.mesh.name or not layout.attr.is_replicated
    return replace(bare, layout=layout) if said else bare


# -- whole programs ----------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,3}", fullmatch=True).filter(can_name)
OPS = [torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.slice.Tensor,
       torch.ops.prims.convert_element_type.default, torch.ops.aten.native_layer_norm.default,
       torch.ops.aten.sum.dim_IntList]  # fmt: skip
STRINGS = st.text(max_size=5)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Anything that prints and parses: tensors stand where an op takes them; nothing else of its schema is kept, and no
    rule."""
    level = draw(st.sampled_from(LEVELS))
    mesh = None if level == "traced" and draw(st.booleans()) else draw(MESHES)
    stages: dict[str, Mesh] = {}
    if mesh is not None and level not in LOCAL:
        for name in draw(st.lists(NAMES, max_size=2, unique=True)):
            sub = draw(MESHES)
            stages[name] = Mesh(
                dict(sub.axes), ranks=range(shift := draw(st.integers(0, 2)), shift + sub.size), name=name
            )
    at = draw(st.sampled_from(list(mesh.points()))) if mesh is not None and level in LOCAL else None
    streams = tuple(draw(st.lists(NAMES, max_size=2, unique=True))) if level == "scheduled" else ()
    program = Program(fx.Graph(), level, mesh, stages=stages, streams=streams, coordinates=at)
    names = draw(st.lists(NAMES, min_size=1, max_size=7, unique=True))
    values: list[fx.Node] = []
    phase = "forward"
    for name in names:
        phase = draw(st.sampled_from([phase, *PHASES]))
        values.append(draw(nodes(program, name, values, phase)))
    finish(draw, program, values)
    return program


@st.composite
def nodes(draw: st.DrawFn, program: Program, name: str, values: list[fx.Node], phase: str) -> fx.Node:
    kind = draw(st.sampled_from(["placeholder", "constant", "call", "call", "transfer", "element"]))
    stream = draw(st.sampled_from([None, *program.streams]))
    tuples = [v for v in values if isinstance(record_of(v).type, tuple)]
    tensors = [v for v in values if isinstance(record_of(v).type, TensorType)]
    type: ValueType = draw(tensor_types(program))
    if kind == "constant":
        content = draw(st.sampled_from([torch.tensor([math.nan, -0.0, 1e-30, -math.inf]),
                                        torch.tensor([[True], [False]]), torch.tensor(3), torch.zeros(0, 3),
                                        torch.arange(40), torch.tensor([1 + 2j]),
                                        torch.ones(2, dtype=torch.bfloat16)]))  # fmt: skip
        node = make_node(program.graph, name, "get_attr", name, (), {})
        program.constants[name] = Constant.of(content)
        type = TensorType(
            tuple(content.shape),
            content.dtype,
            type.layout and Layout(type.layout.mesh, DistAttr.replicated(content.ndim)),
        )
        if program.level == "traced":
            type = replace(type, layout=None)
        set_record(node, Record(type, phase=phase, stream=stream))
    elif kind == "call" or (kind == "element" and not tuples) or (kind == "transfer" and not tensors):
        node, uses = draw(calls(program, name, values))
        if draw(st.booleans()):
            type = tuple(draw(st.lists(st.none() | tensor_types(program), max_size=3)))
        set_record(node, Record(type, uses, phase=phase, stream=stream))
    elif kind == "element":
        source = draw(st.sampled_from(tuples))
        types = record_of(source).type
        if not types:
            return draw(nodes(program, name, [], phase))
        index = draw(st.integers(0, len(types) - 1))
        node = make_node(program.graph, name, "call_function", operator.getitem, (source, index), {})
        set_record(node, Record(types[index], (None,) if program.level in PLACED else (), phase=phase, stream=stream))
    elif kind == "transfer":
        axis = st.sampled_from([*(program.mesh.names if program.mesh else ()), "dp", "inf", "bool", "start"])
        x = draw(st.sampled_from(tensors))
        function, args, kwargs = draw(st.sampled_from([
            (transfers.all_gather, (x, 0, draw(axis)), {"parts": ((4, 8), (2,)), "sizes": [1, 0]}),
            (transfers.all_reduce, (x, draw(axis)), {"op": "max"}),
            (transfers.all_to_all, (x, 0, 1, draw(axis)), {"sizes": [3, 2], "new_sizes": [2, 2]}),
            (transfers.cast, (x, torch.float8_e5m2), {}),
            (transfers.send, (x, draw(axis)), {}),
        ]))  # fmt: skip
        node = make_node(program.graph, name, "call_function", function, args, kwargs)
        set_record(node, Record(type, phase=phase, stream=stream, started=draw(st.booleans())))
    else:
        role = draw(st.sampled_from(["input", "param", "buffer", "tangent", "state"]))
        user = draw(STRINGS)
        node = make_node(program.graph, name, "placeholder", name, (), {})
        index = draw(st.integers(0, 3)) if role == "tangent" else None
        set_record(
            node, Record(type, phase=phase, role=role, index=index, name="" if user == name else user, stream=stream)
        )
    return node


@st.composite
def calls(
    draw: st.DrawFn, program: Program, name: str, values: list[fx.Node]
) -> tuple[fx.Node, tuple[Requirement | None, ...]]:
    operand = st.sampled_from(values) if values else st.none()
    some = st.lists(operand | ARGUMENTS | st.lists(operand, max_size=2), max_size=3)
    args = tuple(draw(some))
    kwargs = dict(zip(draw(st.lists(NAMES, max_size=2, unique=True)), draw(some), strict=False))
    op = draw(st.sampled_from(OPS))
    if misplaced(op, args, kwargs):
        args, kwargs = args[:1] if not misplaced(op, args[:1], {}) else (), {}
    node = make_node(program.graph, name, "call_function", op, args, kwargs)
    return node, draw(requirements(program, operands(node)))


@st.composite
def requirements(draw: st.DrawFn, program: Program, values: list[fx.Node]) -> tuple[Requirement | None, ...]:
    if program.level not in PLACED:
        return ()
    needs: list[Requirement | None] = []
    for value in values:
        own = record_of(value).type
        if not isinstance(own, TensorType):
            needs.append(None)
        elif draw(st.booleans()):
            needs.append(Requirement(own.layout, own.dtype))
        else:
            needs.append(
                Requirement(draw(layouts(program, own.shape)), draw(st.sampled_from([own.dtype, torch.float16])))
            )
    return tuple(needs)


def finish(draw: st.DrawFn, program: Program, values: list[fx.Node]) -> None:
    """The output: a tree of returned values, gradients of some placeholders, all states."""
    some = st.sampled_from(values)
    returned = draw(st.lists(some, max_size=3))
    fragments = ["{'it # as': ", ", 'b': [None, inf, ", '], "x,\'": Out(f32=', ", n=-3)}"]
    program.tree = (
        (*fragments[: len(returned)], "".join(fragments[len(returned) :])) if returned or draw(st.booleans()) else ()
    )
    found = [(Result("return"), value) for value in returned]
    found += [(Result("grad", p.name), draw(some)) for p in program.placeholders if draw(st.booleans())]
    found += [(Result("state", p.name), draw(some)) for p in program.placeholders if record_of(p).role == "state"]
    output = program.graph.output(tuple(value for _, value in found))
    uses = draw(requirements(program, [value for _, value in found]))
    set_record(output, Record(None, uses, results=tuple(result for result, _ in found)))
