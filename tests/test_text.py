"""The program's text: what prints parses back to an equal program, equal means equal text, and errors point."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attrs, meshes, shapes
from torch import fx

from autopar import transfers
from autopar.capture import capture
from autopar.errors import TextError
from autopar.layout import DistAttr, Layout
from autopar.localize import localize
from autopar.mesh import Mesh
from autopar.passes import Place, Reshard, Share, run_passes
from autopar.program import LEVELS, Constant, Program, make_node, operands, record_of, set_record
from autopar.record import DTYPES, PHASES, Record, Requirement, Result, TensorType, ValueType
from autopar.text.printer import print_literal, print_type, target_name
from autopar.text.tokens import LITERALS, RESERVED, Cursor, can_name, legal_name

FOLDER = Path(__file__).parent / "golden" / "text"
PLACED = ("placed", "explicit")
LOCAL = ("local", "scheduled")


def check(program: Program) -> None:
    """It prints, parses back to an equal program, and that prints the same."""
    text = str(program)
    again = Program.parse(text)
    assert again == program, program.diff(again)
    assert str(again) == text
    assert program.copy() == program


# -- captured models ---------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[], tuple[torch.nn.Module, tuple[object, ...]]]] = {
    "block": lambda: (models.Block(), (torch.randn(6, 8),)),
    "residual": lambda: (models.Residual(7, 9), (torch.randn(5, 3, 7),)),
    "language": lambda: (models.Language(), (torch.zeros(4, 3, dtype=torch.long), torch.zeros(4, 3, dtype=torch.long))),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_level_of_captured_models(name: str) -> None:
    model, args = CALLS[name]()
    program = capture(model, args, {}).program
    check(program)
    mesh = Mesh(dp=2, tp=2)
    split = {p.name: DistAttr.split("dp", *[None] * (len(record_of(p).type.shape) - 1)) for p in program.placeholders if record_of(p).role == "input"}
    split |= {p.name: DistAttr.split("tp", None) for p in program.placeholders if record_of(p).name.endswith("up.weight")}
    before = str(program)
    for step in (Place(mesh, split), Reshard(), Share()):
        run_passes(program, [step])
        check(program)
        assert str(program) != before
        before = str(program) if step.name != "reshard" else ""
    assert "/tp" in str(program) and "all_reduce" in str(program)
    for at in mesh.points():
        check(localize(program, at))


def test_comments_are_outside_equality() -> None:
    model, args = CALLS["block"]()
    program = capture(model, args, {}).program
    text = program.text(comments=True)
    assert re.search(r"= gelu\(addmm\)  # act  models\.py:\d+  return self\.down", text)
    assert Program.parse(text) == program
    noisy = "\n# on top\n\n" + str(program).replace("\n", "   # said 'so'\n").replace("forward:", "\n  # between\nforward:")
    assert Program.parse(noisy) == program


# -- literals and types ------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.none(), st.text(), st.sampled_from(sorted(LITERALS, key=repr)),
    st.complex_numbers(), st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")]),
    st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 1e-300, 1e300, 5e-324, 0.1, "it's", 'a "b" # c', "\\", "\n#"]),
)  # fmt: skip
ARGUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple), max_leaves=6)


def read_literal(text: str) -> object:
    cursor = Cursor()
    cursor.open(1, text)
    found = cursor.literal()
    cursor.close()
    return found


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS)
def test_literals(value: object) -> None:
    text = print_literal(value)
    assert repr(read_literal(text)) == repr(value)
    assert "\n" not in text


@pytest.mark.parametrize(("value", "text"), [
    (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (-0.0, "-0.0"), (1e-300, "1e-300"), (-3, "-3"), (True, "True"),
    (None, "None"), ("it's", '"it\'s"'), ("#", "'#'"), (torch.bfloat16, "bf16"), (torch.device("cuda:1"), "device('cuda:1')"),
    (torch.channels_last, "channels_last"), (torch.strided, "strided"), ([1, (2.0,), []], "[1, (2.0,), []]"),
    (complex(1, -0.0), "complex(1.0, -0.0)"),
])  # fmt: skip
def test_how_literals_print(value: object, text: str) -> None:
    assert print_literal(value) == text


@pytest.mark.parametrize("value", [object(), {1}, torch.complex32, torch.sparse_csr, b"bytes", torch.ones(1)])
def test_what_the_grammar_has_no_form_for(value: object) -> None:
    with pytest.raises(TypeError, match="the program's text has no form for"):
        print_literal(value)


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
OPS = [torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.slice.Tensor, torch.ops.prims.convert_element_type.default,
       torch.ops.aten.native_layer_norm.default, torch.ops.aten.sum.dim_IntList]  # fmt: skip
STRINGS = st.text(max_size=5)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Anything that prints: neither the ops' schemas nor their rules are kept."""
    level = draw(st.sampled_from(LEVELS))
    mesh = None if level == "traced" and draw(st.booleans()) else draw(MESHES)
    stages: dict[str, Mesh] = {}
    if mesh is not None and level not in LOCAL:
        for name in draw(st.lists(NAMES, max_size=2, unique=True)):
            sub = draw(MESHES)
            stages[name] = Mesh(dict(sub.axes), ranks=range(shift := draw(st.integers(0, 2)), shift + sub.size), name=name)
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
        content = draw(st.sampled_from([torch.tensor([math.nan, -0.0, 1e-30, -math.inf]), torch.tensor([[True], [False]]), torch.tensor(3),
                                        torch.zeros(0, 3), torch.arange(40), torch.tensor([1 + 2j]), torch.ones(2, dtype=torch.bfloat16)]))  # fmt: skip
        node = make_node(program.graph, name, "get_attr", name, (), {})
        program.constants[name] = Constant.of(content)
        type = TensorType(tuple(content.shape), content.dtype, type.layout and Layout(type.layout.mesh, DistAttr.replicated(content.ndim)))
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
        set_record(node, Record(type, phase=phase, role=role, index=index, name="" if user == name else user, stream=stream))
    return node


@st.composite
def calls(draw: st.DrawFn, program: Program, name: str, values: list[fx.Node]) -> tuple[fx.Node, tuple[Requirement | None, ...]]:
    operand = st.sampled_from(values) if values else st.none()
    some = st.lists(operand | ARGUMENTS | st.lists(operand, max_size=2), max_size=3)
    args = tuple(draw(some))
    kwargs = dict(zip(draw(st.lists(NAMES, max_size=2, unique=True)), draw(some), strict=False))
    node = make_node(program.graph, name, "call_function", draw(st.sampled_from(OPS)), args, kwargs)
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
            needs.append(Requirement(draw(layouts(program, own.shape)), draw(st.sampled_from([own.dtype, torch.float16]))))
    return tuple(needs)


def finish(draw: st.DrawFn, program: Program, values: list[fx.Node]) -> None:
    """The output: a tree of returned values, gradients of some placeholders, all states."""
    some = st.sampled_from(values)
    returned = draw(st.lists(some, max_size=3))
    fragments = ["{'it # as': ", ", 'b': [None, inf, ", "], \"x,'\": Out(f32=", ", n=-3)}"]
    program.tree = (*fragments[: len(returned)], "".join(fragments[len(returned) :])) if returned or draw(st.booleans()) else ()
    found = [(Result("return"), value) for value in returned]
    found += [(Result("grad", p.name), draw(some)) for p in program.placeholders if draw(st.booleans())]
    found += [(Result("state", p.name), draw(some)) for p in program.placeholders if record_of(p).role == "state"]
    output = program.graph.output(tuple(value for _, value in found))
    uses = draw(requirements(program, [value for _, value in found]))
    set_record(output, Record(None, uses, results=tuple(result for result, _ in found)))


@settings(max_examples=250, deadline=None)
@given(programs())
def test_random_programs(program: Program) -> None:
    check(program)


@settings(max_examples=120, deadline=None)
@given(programs(), st.data())
def test_any_single_change_is_seen(program: Program, data: st.DataObject) -> None:
    """Records, arguments, order and header: a changed copy differs from the program, and so does its text."""
    changed = program.copy()
    node = data.draw(st.sampled_from(list(changed.nodes)))
    record = record_of(node)
    fields = {
        "type": TensorType((997,), torch.float64),
        "uses": (*record.uses, None),
        "phase": next(p for p in PHASES if p != record.phase),
        "role": "none",
        "index": 997,
        "name": "another name",
        "results": (*record.results, Result("return")),
        "stream": "another",
        "started": not record.started,
    }
    what = data.draw(st.sampled_from([*fields, "args", "kwargs", "tree", "streams", "level", "mesh", "at", "stage", "name_", "comment"]))
    if what in fields:
        set_record(node, replace(record, **{what: fields[what]}))
    elif what == "args":
        node.args = (*node.args, 1)
    elif what == "kwargs":
        node.kwargs = {**node.kwargs, "another": -0.0}
    elif what == "tree":
        changed.tree = (*changed.tree, " ")
    elif what == "streams":
        changed.streams = (*changed.streams, "another")
    elif what == "level":
        changed.level = next(level for level in LEVELS if level != program.level)
    elif what == "mesh":
        changed.mesh = Mesh(another=2)
    elif what == "at":
        changed.coordinates = {"another": 0}
    elif what == "stage":
        changed.stages["another"] = Mesh(another=2, name="another")
    elif what == "name_":
        node.name = "another"
    else:
        set_record(node, replace(record, module="another", source="another"))
    assert (changed == program) == (what == "comment")


def test_equal_means_the_same_kind_of_zero() -> None:
    def text(literal: str) -> str:
        return f"program traced\n  x : f32[2] = input\nforward:\n  c : f32[] = constant({literal})\n  y : f32[2] = add.Scalar(x, {literal})\n"

    kinds = {literal: Program.parse(text(literal)) for literal in ("0", "0.0", "-0.0", "nan", "1", "1.0", "True", "False")}
    for literal, program in kinds.items():
        assert [other for other in kinds if kinds[other] == program] == [literal]
        assert str(program) == text(literal)
        assert program == Program.parse(text(literal))
    assert kinds["0"] != text("0")


# -- all that one token can be -----------------------------------------------------------------------------------

DENSE = """\
program explicit on dp=2 tp=2
stage s0 on dp=2
stage s1 on dp=2 ranks 2 3
  w : f32[8/dp 4] = state(w_dp, 'up.weight')
  b : bf16[(3 4/dp) 6] +tp = param("it's # b")
  d_out : i64[5/dp/tp] +max:tp = tangent(0)
  x : f32[8 4] @s1 = input
forward:
  c : f32[2] = constant((0.5, -0.0))
  ln : (f32[4 4/tp], None, bool[]) = native_layer_norm(w as [8 4], [4], None, c, 1e-05)
  y : f32[4 4/tp] = ln[0]
backward:
  cat : f32[8 4] = cat([y as bf16[4/dp 4], w as [8/tp 4]], -1, dim=0, dtype=f32, device=device('cpu'))
  w_dp : f32[8 4] = all_gather(w, 0, dp, parts=((8,), (4,)))
update:
  b_tp : bf16[12 6] = all_reduce(b, tp, op=max)
  return {'loss': b_tp as [12 6/tp], 'n': (3, Out(x=y))}
  grad b = b
  state w = w_dp as [8/dp 4]
"""


def mutations(text: str) -> list[str]:
    """Every token of every line replaced by each token of its kind that occurs in the text, and left out."""
    cursor = Cursor()
    lines = text.splitlines()
    where = []
    for k, line in enumerate(lines):
        cursor.open(k, line)
        where += [(k, token) for token in cursor.tokens]
    kinds = {kind: sorted({token.text for _, token in where if token.kind == kind}) for kind in ("word", "number", "string", "sign")}
    found = []
    for k, token in where:
        for other in ("", *kinds[token.kind]):
            if other != token.text:
                changed = lines[k][: token.start] + other + lines[k][token.end :]
                found.append("\n".join([*lines[:k], changed, *lines[k + 1 :]]) + "\n")
    return found


def test_equality_is_that_of_the_text_whatever_token_changes() -> None:
    base = Program.parse(DENSE)
    assert str(base) == DENSE
    parsed = refused = 0
    for text in mutations(DENSE):
        try:
            other = Program.parse(text)
        except TextError:
            refused += 1
            continue
        parsed += 1
        assert (other == base) == (str(other) == DENSE), text
        assert Program.parse(str(other)) == other, text
    assert parsed > 400 and refused > 2000


def test_order_of_lines_is_meaning() -> None:
    base = Program.parse(DENSE)
    lines = DENSE.splitlines(keepends=True)
    swapped = 0
    for k in range(1, len(lines) - 1):
        try:
            other = Program.parse("".join([*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]))
        except TextError:
            continue
        swapped += other != base
        assert (other == base) == (str(other) == DENSE)
    assert swapped >= 9  # results have one order, however they are written


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([DENSE, *(path.read_text() for path in sorted(FOLDER.glob("*.txt")))]), st.data())
def test_noise_is_refused_with_a_line_number_or_read(text: str, data: st.DataObject) -> None:
    """Nothing but TextError comes out of the parser."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.sampled_from([0, 1, 1, 2, 9])))
        noise = data.draw(st.sampled_from(["", " ", "(", ")", "[", "]", ",", "=", "/", "+", "@", "?", ":", "'", "#", "\n", "1e5", "-1", "-inf", "x", "as", "on",
                                           "start", "None", "f32", "é", "\\", "'\\x'", "constant('a')", "complex(1)", "device('z')", "state(x)", "\t"]))  # fmt: skip
        text = text[:start] + noise + text[end:]
    try:
        program = Program.parse(text)
    except TextError as error:
        assert re.match(r"line \d+: .|an empty text", str(error))
    else:
        assert Program.parse(str(program)) == program


# -- errors ------------------------------------------------------------------------------------------------------

HEAD = "program placed on dp=2 tp=2\nstage s0 on dp=2\n  x : f32[4/dp 6] = input\n  p : (f32[2], None) = topk(x)\nforward:\n"
TRACED = "program traced\n  x : f32[4 6] = input\nforward:\n"
ERRORS = {
    "": "an empty text is not a program; it starts with a header, as in 'program traced'",
    "# nothing\n": "an empty text is not a program; it starts with a header, as in 'program traced'",
    "  x : f32[2] = input": "line 1: the first line, and no other, is the header, as in 'program explicit on dp=2'; levels are traced, placed, explicit, local, scheduled\n    x : f32[2] = input",
    "program traced\nprogram traced": "line 2: the first line, and no other, is the header, as in 'program explicit on dp=2'; levels are traced, placed, explicit, local, scheduled\n    program traced",
    "program sharded on dp=2": "line 1: no level 'sharded'; levels are traced, placed, explicit, local, scheduled\n    program sharded on dp=2",
    "program": "line 1: the line ends where a word is expected\n    program",
    "program traced on dp=0": "line 1: axis 'dp' has size 0; the size of an axis is an integer ≥ 1\n    program traced on dp=0",
    "program traced on dp=1.5": "line 1: expected an integer, found '1.5'\n    program traced on dp=1.5",
    "program traced on dp=2 dp=2": "line 1: the axis dp is named twice\n    program traced on dp=2 dp=2",
    "program traced on dp=2 ranks 1": "line 1: dp=2 needs 2 different ranks, got 1: [1]\n    program traced on dp=2 ranks 1",
    "program traced dp=2": "line 1: 'dp' is left over\n    program traced dp=2",
    "program traced\nstage s on dp=2\nstage s on dp=2": "line 3: the stage s is named twice\n    stage s on dp=2",
    "program traced\nstage s dp=2": "line 2: expected 'on', found 'dp'\n    stage s dp=2",
    "program scheduled\nstream s\nstream s": "line 3: the stream s is named twice\n    stream s",
    "program traced\nx : f32[2] = input": "line 2: a line starts with 'program', 'stage', 'stream', a phase, or two spaces and a value\n    x : f32[2] = input",
    "program traced\n x : f32[2] = input": "line 2: a line starts with 'program', 'stage', 'stream', a phase, or two spaces and a value\n    x : f32[2] = input",
    "program traced\nmiddle:": "line 2: a line starts with 'program', 'stage', 'stream', a phase, or two spaces and a value\n    middle:",
    TRACED + "  y : f32[4 6] = relu(z)": "line 4: z is read before it is made\n    y : f32[4 6] = relu(z)",
    TRACED + "  y : f32[4 6] = relu(y)": "line 4: y is read before it is made\n    y : f32[4 6] = relu(y)",
    TRACED + "  x : f32[4 6] = relu(x)": "line 4: the value x is made twice\n    x : f32[4 6] = relu(x)",
    TRACED + "  y : f32[4 6] = relux(x)": "line 4: no op or transfer 'relux'; ops print as 'mm', 'add.Tensor' or 'library::op'\n    y : f32[4 6] = relux(x)",
    TRACED + "  y : f32[4 6] = mm.no(x, x)": "line 4: no op or transfer 'mm.no'; ops print as 'mm', 'add.Tensor' or 'library::op'\n    y : f32[4 6] = mm.no(x, x)",
    TRACED + "  y : f32[4 6] = no::relu(x)": "line 4: no op or transfer 'no::relu'; ops print as 'mm', 'add.Tensor' or 'library::op'\n    y : f32[4 6] = no::relu(x)",
    TRACED + "  y : float[4 6] = relu(x)": f"line 4: no dtype 'float'; dtypes are {', '.join(DTYPES)}\n    y : float[4 6] = relu(x)",
    TRACED + "  y : f32[4/dp 6] = relu(x)": "line 4: a value is placed, but the header names no mesh, as in 'on dp=2 tp=2'\n    y : f32[4/dp 6] = relu(x)",
    TRACED + "  y : f32[-4 6] = relu(x)": "line 4: a size is at least 0, not -4\n    y : f32[-4 6] = relu(x)",
    TRACED + "  y : f32[(4) 6] = relu(x)": "line 4: a merged dim has two parts or more, as in (4/dp 128)\n    y : f32[(4) 6] = relu(x)",
    TRACED + "  y : f32[4 6 = relu(x)": "line 4: expected a number, found '='\n    y : f32[4 6 = relu(x)",
    TRACED + "  y : f32[4 6] = relu(x": "line 4: the line ends where ',' is expected\n    y : f32[4 6] = relu(x",
    TRACED + "  y : f32[4 6] = relu(x) 3": "line 4: '3' is left over\n    y : f32[4 6] = relu(x) 3",
    TRACED + "  y : f32[4 6] = relu(x) ~ ": "line 4: '~' is not part of the grammar\n    y : f32[4 6] = relu(x) ~",
    TRACED + "  y f32[4 6] = relu(x)": "line 4: expected ':', found 'f32'\n    y f32[4 6] = relu(x)",
    TRACED + "  sum : f32[] = sum(x)": "line 4: FX does not accept 'sum' as a name; a trailing underscore and a number make it one\n    sum : f32[] = sum(x)",
    TRACED + "  lambda : f32[] = sum(x)": "line 4: FX does not accept 'lambda' as a name; a trailing underscore and a number make it one\n    lambda : f32[] = sum(x)",
    TRACED + "  torch : f32[] = sum(x)": "line 4: FX does not accept 'torch' as a name; a trailing underscore and a number make it one\n    torch : f32[] = sum(x)",
    TRACED + "  a.b : f32[] = sum(x)": "line 4: 'a.b' cannot name a value; it has a meaning of its own\n    a.b : f32[] = sum(x)",
    TRACED + "  y : f32[4 6] = add.Tensor(x, alpha=1, alpha=1)": "line 4: the argument alpha is given twice\n    y : f32[4 6] = add.Tensor(x, alpha=1, alpha=1)",
    TRACED + "  y : f32[4 6] = add.Tensor(x, alpha=1, x)": "line 4: arguments by position come before those by name\n    y : f32[4 6] = add.Tensor(x, alpha=1, x)",
    TRACED + "  y : f32[4 6] = add.Tensor(x, alpha=f(1))": "line 4: expected a scalar, found 'f'\n    y : f32[4 6] = add.Tensor(x, alpha=f(1))",
    TRACED + "  y : f32[4 6] = relu(x, device('z'))": None,
    TRACED + "  y : f32[4 6] = add.Tensor(x, '\\x')": "line 4: '\\x' is no Python string\n    y : f32[4 6] = add.Tensor(x, '\\x')",
    TRACED + "  y : f32[] = x[0]": "line 4: x is one tensor and has no elements: there is no x[0]\n    y : f32[] = x[0]",
    TRACED + "  y : f32[4 6] = relu(x as [4 6])": "line 4: only ops and results of placed and explicit programs require a Layout with 'as'; transfers take what they are given\n    y : f32[4 6] = relu(x as [4 6])",
    TRACED + "  y : (f32[2], f32[2]) = constant(1)": "line 4: a constant is one tensor\n    y : (f32[2], f32[2]) = constant(1)",
    TRACED + "  y : f32[2] = constant((1, 2, 3))": "line 4: these elements have the shape [3], the type says [2]\n    y : f32[2] = constant((1, 2, 3))",
    TRACED + "  y : f32[2] = constant(((1, 2), 3))": None,
    TRACED + "  y : f32[2] = state": "line 4: a state names the value that replaces it, as in 'state(next)'; other placeholders do not\n    y : f32[2] = state",
    TRACED + "  y : f32[2] = state('y')": "line 4: a state names the value that replaces it, as in 'state(next)'; other placeholders do not\n    y : f32[2] = state('y')",
    TRACED + "  y : f32[2] = param(x)": "line 4: a state names the value that replaces it, as in 'state(next)'; other placeholders do not\n    y : f32[2] = param(x)",
    TRACED + "  y : f32[2] = tangent": "line 4: a tangent names the position of its value among those returned, as in 'tangent(0)'; other placeholders do not\n    y : f32[2] = tangent",
    TRACED + "  y : f32[2] = input(0)": "line 4: a tangent names the position of its value among those returned, as in 'tangent(0)'; other placeholders do not\n    y : f32[2] = input(0)",
    TRACED + "  y : f32[2] = state(z)\n  return x": "line 4: the state y is replaced by z, which is no value of the program\n    y : f32[2] = state(z)",
    TRACED + "  return x\n  return x": "line 5: the program returns twice\n    return x",
    TRACED + "  grad z = x": "line 4: z is no placeholder of the program\n    grad z = x",
    TRACED + "  y : f32[4 6] = relu(x)\n  grad y = x": "line 5: y is no placeholder of the program\n    grad y = x",
    TRACED + "  grad x = x\n  grad x = x": "line 5: the gradient of x is given twice\n    grad x = x",
    TRACED + "  state x = x": "line 4: x is no state of the program\n    state x = x",
    TRACED + "  y : f32[4 6] = state(x)\n  state y = y": "line 5: the state y is replaced by x, as its placeholder says\n    state y = y",
    TRACED + "  y : f32[4 6] = state(x)\n  state y = x\n  state y = x": "line 6: the next value of y is given twice\n    state y = x",
    HEAD + "  y : f32[4/ep 6] = relu(x)": "line 6: the mesh (dp=2 tp=2) has no axis 'ep'; its axes are dp, tp; did you mean 'tp'?\n    y : f32[4/ep 6] = relu(x)",
    HEAD + "  y : f32[4 6] +sum = relu(x)": "line 6: the mesh (dp=2 tp=2) has no axis 'sum'; its axes are dp, tp\n    y : f32[4 6] +sum = relu(x)",
    HEAD + "  y : f32[4 6] +dp +max:dp = relu(x)": "line 6: the value is pending twice over dp\n    y : f32[4 6] +dp +max:dp = relu(x)",
    HEAD + "  y : f32[4 6/tp] @s0 = relu(x)": "line 6: the mesh (dp=2) has no axis 'tp'; its axes are dp; did you mean 'dp'?\n    y : f32[4 6/tp] @s0 = relu(x)",
    HEAD + "  y : f32[4 6] @s1 = relu(x)": "line 6: there is no stage 's1'; stages are s0\n    y : f32[4 6] @s1 = relu(x)",
    HEAD + "  y : f32[4 6] = relu(x as [4 7])": "line 6: x has the shape [4, 6], required is [4, 7]\n    y : f32[4 6] = relu(x as [4 7])",
    HEAD + "  y : f32[4 6] = relu(x as f31[4 6])": f"line 6: no dtype 'f31'; dtypes are {', '.join(DTYPES)}\n    y : f32[4 6] = relu(x as f31[4 6])",
    HEAD + "  y : f32[4 6] = relu(p as [4 6])": "line 6: p has several tensors; require a Layout of its elements\n    y : f32[4 6] = relu(p as [4 6])",
    HEAD + "  y : f32[4 6] = all_gather(x as [4 6], 0, dp)": "line 6: only ops and results of placed and explicit programs require a Layout with 'as'; transfers take what they are given\n    y : f32[4 6] = all_gather(x as [4 6], 0, dp)",
    HEAD + "  y : f32[4 6] = all_gather(p, 0, dp)": "line 6: all_gather takes one tensor; p has several\n    y : f32[4 6] = all_gather(p, 0, dp)",
    HEAD + "  y : f32[4 6] = all_gather()": "line 6: all_gather takes a value first, as in all_gather(x)\n    y : f32[4 6] = all_gather()",
    HEAD + "  y : f32[4 6] = all_gather(x, 0)": "line 6: all_gather: missing a required argument: 'axis'\n    y : f32[4 6] = all_gather(x, 0)",
    HEAD + "  y : f32[2] = p[2]": "line 6: p has 2 elements: there is no p[2]\n    y : f32[2] = p[2]",
    "program local on dp=2 at dp=0\n  x : f32[4/dp] = input": "line 2: a local program has the sizes of one rank, without '/axis', '+axis' or '@stage'\n    x : f32[4/dp] = input",
    "program scheduled on dp=2 at dp=0\n  x : f32[4] +dp = input": "line 2: a scheduled program has the sizes of one rank, without '/axis', '+axis' or '@stage'\n    x : f32[4] +dp = input",
    "program local on dp=2 at dp=0\nstage s on dp=2\n  x : f32[4] @s = input": "line 3: a local program has the sizes of one rank, without '/axis', '+axis' or '@stage'\n    x : f32[4] @s = input",
    "program placed\n  x : f32[4] = input": "line 2: a value is placed, but the header names no mesh, as in 'on dp=2 tp=2'\n    x : f32[4] = input",
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_the_line_and_what_is_wrong(text: str) -> None:
    with pytest.raises(TextError) as caught:
        Program.parse(text)
    if ERRORS[text] is None:  # torch says why
        assert re.match(r"line 4: (no device|these elements make no tensor): .+\n    y : ", str(caught.value))
    else:
        assert str(caught.value) == ERRORS[text]


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_names(name: str) -> None:
    assert not can_name(name)
    with pytest.raises(TextError, match=r"^line 2: "):
        Program.parse(f"program traced\n  {name} : f32[2] = input\n")
    if name not in ("return", "grad", "state"):  # these begin lines of their own
        with pytest.raises(TextError, match=f"'{name}' cannot name a value; it has a meaning of its own"):
            Program.parse(f"program traced\n  {name} : f32[2] = input\n")


@settings(max_examples=200, deadline=None)
@given(st.from_regex(r"[a-z_]{1,8}[0-9_]{0,3}", fullmatch=True) | st.sampled_from(["float", "input", "nan", "inf", "device", "pytree", "fx_pytree", "None", "_", "x_1"]))
def test_fx_keeps_the_names_that_can_be(name: str) -> None:
    graph = fx.Graph()
    graph.placeholder("before")
    if can_name(name) and name != "before":
        assert graph.create_node("placeholder", name, name=name).name == name
    assert can_name(f"{legal_name(name)}_1")


def test_a_model_may_call_its_parameters_what_it_likes() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("state", "grad_", "constant", "f32", "sum", "forward_", "inf"):
                self.register_parameter(name, torch.nn.Parameter(torch.ones(3)))

        def forward(self, start: torch.Tensor, on: torch.Tensor) -> dict[str, object]:
            return {"a # 'b'": start * on + sum(self.parameters()), "n": 3.5}

    program = capture(Odd(), (torch.ones(3), torch.ones(3)), {}).program
    check(program)
    assert "  state_ : f32[3] = param('state')" in str(program)
    assert "  on_ : f32[3] = input('on')" in str(program)
    assert "  return {\"a # 'b'\": " in str(program)


# -- what prints -------------------------------------------------------------------------------------------------


def test_ops_print_with_their_library_where_it_is_not_aten() -> None:
    assert target_name(torch.ops.aten.mm.default) == "mm"
    assert target_name(torch.ops.aten.slice.Tensor) == "slice.Tensor"
    assert target_name(transfers.slice) == "slice"
    assert target_name(torch.ops.prims.convert_element_type.default) == "prims::convert_element_type"


def test_merged_dims_print_in_their_normal_form() -> None:
    mesh = Mesh(dp=2, tp=2, one=1)

    def normal(text: str) -> str:
        return print_type(record_of(Program.parse(f"program explicit on dp=2 tp=2 one=1\n  x : f32{text} = input\n").node("x")).type)[3:]

    assert normal("[(4/dp 128)]") == "[512/dp]"
    assert normal("[(3 128/tp)]") == "[(3 128/tp)]"
    assert normal("[(1 6/dp/tp 1)]") == "[6/dp/tp]"
    assert normal("[6/one] +one +dp") == "[6] +dp"
    assert normal("[6] +tp +max:dp") == "[6] +max:dp +tp"
    assert mesh.size == 4


def test_what_is_undecided_stays_as_it_is_written() -> None:
    text = "program traced on dp=2\nstage s on dp=2\n  x : f32[4/? (2 3/dp/?)] = input\n  y : f32[4] @s = input\n  z : f32[4] = input\n"
    program = Program.parse(text)
    assert str(program) == text
    assert record_of(program.node("y")).type.layout == Layout(program.stages["s"], DistAttr.replicated(1))
    assert record_of(program.node("z")).type.layout is None


def test_placeholders_between_phases_keep_their_own() -> None:
    """A placeholder's phase is printed like any other's, but for the leading ones."""
    text = "program traced\nbackward:\n  x : f32[2] = input\nforward:\n  y : f32[2] = input\n  z : f32[2] = relu(x)\nbackward:\n  w : f32[2] = input\n"
    program = Program.parse(text)
    assert str(program) == text
    assert [record_of(node).phase for node in program.nodes][:-1] == ["backward", "forward", "forward", "backward"]


def test_states_with_and_without_a_requirement_keep_the_order_of_their_placeholders() -> None:
    text = """\
program placed on dp=2
  a : f32[4] = state(c)
  b : f32[4/dp] = state(c)
forward:
  c : f32[4] = relu(a)
  state b = c as [4/dp]
"""
    program = Program.parse(text)
    assert str(program) == text
    assert [result.of for result in record_of(program.output).results] == ["a", "b"]
    program.verify()


def test_axes_named_like_literals_print_in_quotes() -> None:
    text = "program explicit on inf=2\n  x : f32[4/inf] = input\nforward:\n  x_inf : f32[4] = all_gather(x, 0, 'inf')\n  return x_inf\n"
    program = Program.parse(text)
    program.verify()
    assert str(program) == text
    check(localize(program, {"inf": 0}))


def test_constants() -> None:
    tensors = [torch.tensor(2.5), torch.arange(6).reshape(2, 3), torch.arange(17.0), torch.tensor([True, False]), torch.zeros(0, 2), torch.tensor([1j])]
    graph = fx.Graph()
    program = Program(graph, constants={f"c{k}": Constant.of(t) for k, t in enumerate(tensors)})
    for k, t in enumerate(tensors):
        set_record(make_node(graph, f"c{k}", "get_attr", f"c{k}", (), {}), Record(TensorType(tuple(t.shape), t.dtype)))
    set_record(graph.output(()), Record(None))
    lines = [line.partition(" = ")[2] for line in str(program).splitlines()[2:]]
    assert lines[:2] == ["constant(2.5)", "constant(((0, 1, 2), (3, 4, 5)))"]
    assert re.fullmatch(r"constant\('f32:[0-9a-f]{16}'\)", lines[2])
    assert lines[3:] == ["constant((True, False))", "constant(())", "constant((complex(0.0, 1.0),))"]
    again = Program.parse(str(program))
    assert again == program
    for name, constant in again.constants.items():
        if name == "c2":
            assert constant.tensor is None
        else:
            assert torch.equal(constant.tensor, program.constants[name].tensor)
    other = program.copy()
    other.constants["c2"] = Constant.of(torch.arange(17.0) + 1)
    assert other != program
    del again.constants["c2"]
    again.constants["unused"] = Constant.of(torch.ones(1))
    again.constants["c2"] = program.constants["c2"]
    assert again == program  # a constant that no value reads is no part of the program


def test_diff_is_the_lines_that_differ() -> None:
    base = Program.parse(DENSE)
    other = Program.parse(DENSE.replace("op=max", "op=min"))
    assert base.diff(base) == ""
    changed = [line for line in base.diff(other).splitlines() if line[0] in "+-"]
    assert changed == ["-  b_tp : bf16[12 6] = all_reduce(b, tp, op=max)", "+  b_tp : bf16[12 6] = all_reduce(b, tp, op=min)"]


def test_the_page_of_the_grammar_is_true() -> None:
    """Its examples of types and calls parse, and it names every dtype-independent word."""
    page = (Path(__file__).parent.parent / "autopar" / "text" / "GRAMMAR.md").read_text()
    for word in (*transfers.TRANSFERS, *LEVELS, *PHASES, "state(", "tangent(", "constant(", "start ", "ranks"):
        assert word in page, word
    head = "program explicit on dp=2 tp=2\nstage s1 on dp=2 ranks 2 3\n"
    types = re.findall(r"`(f32\[[^`]*)`", page)
    assert len(types) > 7
    for type in types:
        assert record_of(Program.parse(f"{head}  x : {type} = input\n").node("x")).type is not None
    head = "program placed on dp=2 tp=2\nstage s1 on dp=2\n" + "".join(
        f"  {name} : f32[64 64] = input\n" for name in ("x", "t", "a", "b", "w", "g", "x_s1")
    )
    examples = re.findall(r"`((?:mm|cat|add\.Tensor|{})\([^`]*\))`".format("|".join(transfers.TRANSFERS)), page)
    examples = [example.replace("[32/dp 64]", "[64/dp 64]") for example in examples]
    assert len(examples) > 14
    for example in examples:
        assert f" = {example}\n" in str(Program.parse(f"{head}forward:\n  y : f32[64 64] = {example}\n")), example


def _wide(count: int) -> str:
    lines = ["program traced", "  x0 : f32[4] = input", "forward:"]
    return "\n".join([*lines, *(f"  x{k + 1} : f32[4] = relu(x{k})" for k in range(count))]) + "\n"


def test_a_thousand_lines_are_read_in_a_moment() -> None:
    assert str(Program.parse(_wide(1000))) == _wide(1000)
