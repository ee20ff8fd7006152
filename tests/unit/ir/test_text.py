"""The program's text: how a program prints, and what prints parses back to an equal program."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from hypothesis import given, settings
from random_programs import ARGUMENTS, programs
from torch import fx

from autopar.capture import capture
from autopar.ir import transfers
from autopar.ir.constant import Constant
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import make_node, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.program_data import LEVELS
from autopar.ir.record import PHASES, Record, TensorType
from autopar.ir.text.printer import print_literal, print_type, target_name
from autopar.ir.text.tokens import Cursor
from autopar.passes import Place, Reshard, Share, run_passes
from autopar.runtime.localize import localize


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


@pytest.mark.simulated
@pytest.mark.parametrize("name", CALLS)
def test_every_level_of_captured_models(name: str) -> None:
    model, args = CALLS[name]()
    program = capture(model, args, {}).program
    check(program)
    mesh = Mesh(dp=2, tp=2)
    split = {
        p.name: DistAttr.split("dp", *[None] * (len(record_of(p).type.shape) - 1))
        for p in program.placeholders
        if record_of(p).role == "input"
    }
    split |= {
        p.name: DistAttr.split("tp", None) for p in program.placeholders if record_of(p).name.endswith("up.weight")
    }
    before = str(program)
    for step in (Place(mesh, split), Reshard(), Share()):
        run_passes(program, [step])
        check(program)
        assert str(program) != before
        before = str(program) if step.name != "reshard" else ""
    assert "/tp" in str(program) and "all_reduce" in str(program)
    for at in mesh.points():
        check(localize(program, at))


def test_a_name_that_says_nothing_is_none() -> None:
    text = "program traced\n  up : f32[4 4] = param{}\n  return up\n"
    program = Program.parse(text.format("('up')"))
    assert str(program) == text.format("") and program == Program.parse(str(program))


def test_comments_are_outside_equality() -> None:
    model, args = CALLS["block"]()
    program = capture(model, args, {}).program
    text = program.text(comments=True)
    assert re.search(r"= gelu\(addmm\)  # act  models\.py:\d+  return self\.down", text)
    assert Program.parse(text) == program
    noisy = "\n# on top\n\n" + str(program).replace("\n", "   # said 'so'\n").replace(
        "forward:", "\n  # between\nforward:"
    )
    assert Program.parse(noisy) == program


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


# -- literals and whole programs at random -----------------------------------------------------------------------


def read_literal(text: str) -> object:
    cursor = Cursor()
    cursor.open(1, text)
    found = cursor.literal()
    cursor.close()
    return found


@pytest.mark.simulated
@settings(max_examples=60, deadline=None)
@given(ARGUMENTS)
def test_literals(value: object) -> None:
    text = print_literal(value)
    assert repr(read_literal(text)) == repr(value)
    assert "\n" not in text


@pytest.mark.parametrize(("value", "text"), [
    (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"), (-0.0, "-0.0"), (1e-300, "1e-300"), (-3, "-3"),
    (True, "True"),
    (None, "None"), ("it's", '"it\'s"'), ("#", "'#'"), (torch.bfloat16, "bf16"),
    (torch.device("cuda:1"), "device('cuda:1')"), (torch.channels_last, "channels_last"), (torch.strided, "strided"),
    ([1, (2.0,), []], "[1, (2.0,), []]"), (complex(1, -0.0), "complex(1.0, -0.0)"),
])  # fmt: skip
def test_how_literals_print(value: object, text: str) -> None:
    assert print_literal(value) == text


@pytest.mark.parametrize("value", [object(), {1}, torch.complex32, torch.sparse_csr, b"bytes", torch.ones(1)])
def test_what_the_grammar_has_no_form_for(value: object) -> None:
    with pytest.raises(TypeError, match="the program's text has no form for"):
        print_literal(value)


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(programs())
def test_random_programs(program: Program) -> None:
    check(program)


# -- what prints -------------------------------------------------------------------------------------------------


def test_ops_print_with_their_library_where_it_is_not_aten() -> None:
    assert target_name(torch.ops.aten.mm.default) == "mm"
    assert target_name(torch.ops.aten.slice.Tensor) == "slice.Tensor"
    assert target_name(transfers.slice) == "slice"
    assert target_name(torch.ops.prims.convert_element_type.default) == "prims::convert_element_type"


def test_merged_dims_print_in_their_normal_form() -> None:
    mesh = Mesh(dp=2, tp=2, one=1)

    def normal(text: str) -> str:
        return print_type(
            record_of(Program.parse(f"program explicit on dp=2 tp=2 one=1\n  x : f32{text} = input\n").node("x")).type
        )[3:]

    assert normal("[(4/dp 128)]") == "[512/dp]"
    assert normal("[(3 128/tp)]") == "[(3 128/tp)]"
    assert normal("[(1 6/dp/tp 1)]") == "[6/dp/tp]"
    assert normal("[6/one] +one +dp") == "[6] +dp"
    assert normal("[6] +tp +max:dp") == "[6] +max:dp +tp"
    assert mesh.size == 4


def test_what_is_undecided_stays_as_it_is_written() -> None:
    text = (
        "program traced on dp=2\nstage s on dp=2\n  x : f32[4/? (2 3/dp/?)] = input\n  y : f32[4] @s = input\n  z "
        ": f32[4] = input\n"
    )
    program = Program.parse(text)
    assert str(program) == text
    assert record_of(program.node("y")).type.layout == Layout(program.stages["s"], DistAttr.replicated(1))
    assert record_of(program.node("z")).type.layout is None


def test_placeholders_between_phases_keep_their_own() -> None:
    """A placeholder's phase is printed like any other's, but for the leading ones."""
    text = (
        "program traced\nbackward:\n  x : f32[2] = input\nforward:\n  y : f32[2] = input\n  z : f32[2] = "
        "relu(x)\nbackward:\n  w : f32[2] = input\n"
    )
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
    text = (
        "program explicit on inf=2\n  x : f32[4/inf] = input\nforward:\n  x_inf : f32[4] = all_gather(x, 0, "
        "'inf')\n  return x_inf\n"
    )
    program = Program.parse(text)
    program.verify()
    assert str(program) == text
    check(localize(program, {"inf": 0}))


def test_constants() -> None:
    tensors = [
        torch.tensor(2.5),
        torch.arange(6).reshape(2, 3),
        torch.arange(17.0),
        torch.tensor([True, False]),
        torch.zeros(0, 2),
        torch.tensor([1j]),
    ]
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


def test_the_page_of_the_grammar_is_true() -> None:
    """Its examples of types and calls parse, and it names every dtype-independent word."""
    page = (Path(__file__).parents[3] / "autopar" / "ir" / "text" / "GRAMMAR.md").read_text()
    for word in (*transfers.TRANSFERS, *LEVELS, *PHASES, "state(", "tangent(", "constant(", "start ", "ranks"):
        assert word in page, word
    head = "program explicit on dp=8 tp=2\nsizes s0=8 s1=64\nstage s1 on dp=2 ranks 2 3\n"
    types = re.findall(r"`(f32\[[^`]*)`", page)
    assert len(types) > 7
    for type in types:
        assert record_of(Program.parse(f"{head}  x : {type} = input\n").node("x")).type is not None
    head = "program placed on dp=2 tp=2\nstage s1 on dp=2\n" + "".join(
        f"  {name} : f32[64 64] = input\n" for name in ("x", "t", "a", "b", "w", "g", "x_s1", "w_dp_0", "w_dp_1")
    )
    examples = re.findall(r"`((?:mm|cat|add\.Tensor|{})\([^`]*\))`".format("|".join(transfers.TRANSFERS)), page)
    examples = [example.replace("[32/dp 64]", "[64/dp 64]") for example in examples]
    assert len(examples) > 14
    for example in examples:
        assert f" = {example}\n" in str(Program.parse(f"{head}forward:\n  y : f32[64 64] = {example}\n")), example
    head = "program scheduled on dp=2 at dp=0\nstream dp\nstream comm\n"
    head += "  g : f32[8] = input\n  w : f32[8] = input\nforward:\n"
    started = re.findall(r"`(\w+ : [^`]* = start [^`]*)`", page)
    assert len(started) == 5
    for line in started:
        assert f"  {line}\n" in str(Program.parse(f"{head}  {line}\n")), line


def test_a_mesh_without_axes_prints_as_brackets() -> None:
    text = "program local on () ranks 3 at\nstage s1 on () ranks 5\n  x : f32[8] = input\n"
    program = Program.parse(text)
    assert str(program) == text
    assert program.mesh == Mesh(ranks=[3]) and program.coordinates == {}


def _wide(count: int) -> str:
    lines = ["program traced", "  x0 : f32[4] = input", "forward:"]
    return "\n".join([*lines, *(f"  x{k + 1} : f32[4] = relu(x{k})" for k in range(count))]) + "\n"


def test_a_thousand_lines_are_read_in_a_moment() -> None:
    assert str(Program.parse(_wide(1000))) == _wide(1000)
