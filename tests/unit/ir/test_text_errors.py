"""The program's text: what cannot be read is refused with its line and what is wrong there; names that cannot be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dense_program import DENSE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.errors import TextError
from autopar.ir.program import Program
from autopar.ir.record import DTYPES
from autopar.ir.text.tokens import RESERVED, can_name, legal_name

FOLDER = Path(__file__).parents[2] / "golden" / "text"

HEAD = (
    "program placed on dp=2 tp=2\nstage s0 on dp=2\n  x : f32[4/dp 6] = input\n  p : (f32[2], None) = "
    "topk(x)\nforward:\n"
)
TRACED = "program traced\n  x : f32[4 6] = input\nforward:\n"
STARTS = "a line starts with 'program', 'sizes', 'stage', 'stream', a phase, or two spaces and a value"
ERRORS = {
    "": "an empty text is not a program; it starts with a header, as in 'program traced'",
    "# nothing\n": "an empty text is not a program; it starts with a header, as in 'program traced'",
    "  x : f32[2] = "
    "input": "line 1: the first line, and no other, is the header, as in 'program explicit on dp=2'; levels are "
             "traced, placed, explicit, local, scheduled\n    x : f32[2] = input",
    "program traced\nprogram "
    "traced": "line 2: the first line, and no other, is the header, as in 'program explicit on dp=2'; levels are "
              "traced, placed, explicit, local, scheduled\n    program traced",
    "program sharded on "
    "dp=2": "line 1: no level 'sharded'; levels are traced, placed, explicit, local, scheduled\n    program sharded "
            "on dp=2",
    "program": "line 1: the line ends where a word is expected\n    program",
    "program traced on "
    "dp=0": "line 1: axis 'dp' has size 0; the size of an axis is an integer ≥ 1\n    program traced on dp=0",
    "program traced on dp=1.5": "line 1: expected an integer, found '1.5'\n    program traced on dp=1.5",
    "program traced on dp=2 dp=2": "line 1: the axis dp is named twice\n    program traced on dp=2 dp=2",
    "program traced on dp=2 ranks "
    "1": "line 1: dp=2 needs 2 different ranks, got 1: [1]\n    program traced on dp=2 ranks 1",
    "program traced dp=2": "line 1: 'dp' is left over\n    program traced dp=2",
    "program traced\nstage s on dp=2\nstage s on dp=2": "line 3: the stage s is named twice\n    stage s on dp=2",
    "program traced\nstage s dp=2": "line 2: expected 'on', found 'dp'\n    stage s dp=2",
    "program scheduled\nstream s\nstream s": "line 3: the stream s is named twice\n    stream s",
    "program traced\nx : f32[2] = "
    "input": f"line 2: {STARTS}\n    x : "
             "f32[2] = input",
    "program traced\n x : f32[2] = "
    "input": f"line 2: {STARTS}\n    x : "
             "f32[2] = input",
    "program "
    "traced\nmiddle:": f"line 2: {STARTS}\n "
                       "   middle:",
    TRACED + "  y : f32[4 6] = relu(z)": "line 4: z is read before it is made\n    y : f32[4 6] = relu(z)",
    TRACED + "  y : f32[4 6] = relu(y)": "line 4: y is read before it is made\n    y : f32[4 6] = relu(y)",
    TRACED + "  x : f32[4 6] = relu(x)": "line 4: the value x is made twice\n    x : f32[4 6] = relu(x)",
    TRACED + "  y : f32[4 6] = relux(x)": "line 4: no op or transfer 'relux'; ops print as 'mm', 'add.Tensor' or "
                                          "'library::op'\n    y : f32[4 6] = relux(x)",
    TRACED + "  y : f32[4 6] = mm.no(x, x)": "line 4: no op or transfer 'mm.no'; ops print as 'mm', 'add.Tensor' or "
                                             "'library::op'\n    y : f32[4 6] = mm.no(x, x)",
    TRACED + "  y : f32[4 6] = mul(x, x)": "line 4: mul takes no tensor as its argument 0; an overload of it that "
                                           "does is mul.Tensor\n    y : f32[4 6] = mul(x, x)",
    TRACED + "  y : f32[4 6] = add.Tensor(x, x, alpha=x)": "line 4: add.Tensor takes no tensor as its argument "
                                                           "alpha\n    y : f32[4 6] = add.Tensor(x, x, alpha=x)",
    TRACED + "  y : f32[4 6] = no::relu(x)": "line 4: no op or transfer 'no::relu'; ops print as 'mm', 'add.Tensor' "
                                             "or 'library::op'\n    y : f32[4 6] = no::relu(x)",
    TRACED + "  y : float[4 6] = relu(x)": f"line 4: no dtype 'float'; dtypes are {', '.join(DTYPES)}\n    y : "
                                           f"float[4 6] = relu(x)",
    TRACED + "  y : f32[4/dp 6] = relu(x)": "line 4: a value is placed, but the header names no mesh, as in 'on dp=2 "
                                            "tp=2'\n    y : f32[4/dp 6] = relu(x)",
    TRACED + "  y : f32[-4 6] = relu(x)": "line 4: a size is at least 0, not -4\n    y : f32[-4 6] = relu(x)",
    TRACED + "  y : f32[(4) 6] = relu(x)": "line 4: a merged dim has two parts or more, as in (4/dp 128)\n    y : "
                                           "f32[(4) 6] = relu(x)",
    TRACED + "  y : f32[4 6 = relu(x)": "line 4: expected a number, found '='\n    y : f32[4 6 = relu(x)",
    TRACED + "  y : f32[4 6] = relu(x": "line 4: the line ends where ',' is expected\n    y : f32[4 6] = relu(x",
    TRACED + "  y : f32[4 6] = relu(x) 3": "line 4: '3' is left over\n    y : f32[4 6] = relu(x) 3",
    TRACED + "  y : f32[4 6] = relu(x) ~ ": "line 4: '~' is not part of the grammar\n    y : f32[4 6] = relu(x) ~",
    TRACED + "  y f32[4 6] = relu(x)": "line 4: expected ':', found 'f32'\n    y f32[4 6] = relu(x)",
    TRACED + "  sum : f32[] = sum(x)": "line 4: FX does not accept 'sum' as a name; a trailing underscore and a "
                                       "number make it one\n    sum : f32[] = sum(x)",
    TRACED + "  lambda : f32[] = sum(x)": "line 4: FX does not accept 'lambda' as a name; a trailing underscore and a "
                                          "number make it one\n    lambda : f32[] = sum(x)",
    TRACED + "  torch : f32[] = sum(x)": "line 4: FX does not accept 'torch' as a name; a trailing underscore and a "
                                         "number make it one\n    torch : f32[] = sum(x)",
    TRACED + "  a.b : f32[] = sum(x)": "line 4: 'a.b' cannot name a value; it has a meaning of its own\n    a.b : "
                                       "f32[] = sum(x)",
    TRACED + "  y : f32[4 6] = add.Tensor(x, alpha=1, alpha=1)": "line 4: the argument alpha is given twice\n    y : "
                                                                 "f32[4 6] = add.Tensor(x, alpha=1, alpha=1)",
    TRACED + "  y : f32[4 6] = add.Tensor(x, alpha=1, x)": "line 4: arguments by position come before those by name\n "
                                                           "   y : f32[4 6] = add.Tensor(x, alpha=1, x)",
    TRACED + "  y : f32[4 6] = add.Tensor(x, alpha=f(1))": "line 4: expected a scalar, found 'f'\n    y : f32[4 6] = "
                                                           "add.Tensor(x, alpha=f(1))",
    TRACED + "  y : f32[4 6] = relu(x, device('z'))": None,
    TRACED + "  y : f32[4 6] = add.Tensor(x, '\\x')": "line 4: '\\x' is no Python string\n    y : f32[4 6] = "
                                                      "add.Tensor(x, '\\x')",
    TRACED + "  y : f32[] = x[0]": "line 4: x is one tensor and has no elements: there is no x[0]\n    y : f32[] = "
                                   "x[0]",
    TRACED + "  y : f32[4 6] = relu(x as [4 6])": "line 4: only ops and results of placed and explicit programs "
                                                  "require a Layout with 'as'; transfers accept any Layout\n    y : "
                                                  "f32[4 6] = relu(x as [4 6])",
    TRACED + "  y : (f32[2], f32[2]) = constant(1)": "line 4: a constant is one tensor\n    y : (f32[2], f32[2]) = "
                                                     "constant(1)",
    TRACED + "  y : f32[2] = constant((1, 2, 3))": "line 4: these elements have the shape [3], the type says [2]\n    "
                                                   "y : f32[2] = constant((1, 2, 3))",
    TRACED + "  y : f32[2] = constant(((1, 2), 3))": None,
    TRACED + "  y : f32[2] = state": "line 4: a state names the value that replaces it, as in 'state(next)'; other "
                                     "placeholders do not\n    y : f32[2] = state",
    TRACED + "  y : f32[2] = state('y')": "line 4: a state names the value that replaces it, as in 'state(next)'; "
                                          "other placeholders do not\n    y : f32[2] = state('y')",
    TRACED + "  y : f32[2] = param(x)": "line 4: a state names the value that replaces it, as in 'state(next)'; other "
                                        "placeholders do not\n    y : f32[2] = param(x)",
    TRACED + "  y : f32[2] = tangent": "line 4: a tangent names the position of its value among those returned, as in "
                                       "'tangent(0)'; other placeholders do not\n    y : f32[2] = tangent",
    TRACED + "  y : f32[2] = input(0)": "line 4: a tangent names the position of its value among those returned, as "
                                        "in 'tangent(0)'; other placeholders do not\n    y : f32[2] = input(0)",
    TRACED + "  y : f32[2] = state(z)\n  return x": "line 4: the state y is replaced by z, which is no value of the "
                                                    "program\n    y : f32[2] = state(z)",
    TRACED + "  return x\n  return x": "line 5: the program returns twice\n    return x",
    TRACED + "  grad z = x": "line 4: z is no placeholder of the program\n    grad z = x",
    TRACED + "  y : f32[4 6] = relu(x)\n  grad y = x": "line 5: y is no placeholder of the program\n    grad y = x",
    TRACED + "  grad x = x\n  grad x = x": "line 5: the gradient of x is given twice\n    grad x = x",
    TRACED + "  state x = x": "line 4: x is no state of the program\n    state x = x",
    TRACED + "  y : f32[4 6] = state(x)\n  state y = y": "line 5: the state y is replaced by x, as its placeholder "
                                                         "says\n    state y = y",
    TRACED + "  y : f32[4 6] = state(x)\n  state y = x\n  state y = x": "line 6: the next value of y is given twice\n "
                                                                        "   state y = x",
    HEAD + "  y : f32[4/ep 6] = relu(x)": "line 6: the mesh (dp=2 tp=2) has no axis 'ep'; its axes are dp, tp; did "
                                          "you mean 'tp'?\n    y : f32[4/ep 6] = relu(x)",
    HEAD + "  y : f32[4 6] +sum = relu(x)": "line 6: the mesh (dp=2 tp=2) has no axis 'sum'; its axes are dp, tp\n    "
                                            "y : f32[4 6] +sum = relu(x)",
    HEAD + "  y : f32[4 6] +dp +max:dp = relu(x)": "line 6: the value is pending twice over dp\n    y : f32[4 6] +dp "
                                                   "+max:dp = relu(x)",
    HEAD + "  y : f32[4 6/tp] @s0 = relu(x)": "line 6: the mesh (dp=2) has no axis 'tp'; its axes are dp; did you "
                                              "mean 'dp'?\n    y : f32[4 6/tp] @s0 = relu(x)",
    HEAD + "  y : f32[4 6] @s1 = relu(x)": "line 6: there is no stage 's1'; stages are s0\n    y : f32[4 6] @s1 = "
                                           "relu(x)",
    HEAD + "  y : f32[4 6] = relu(x as [4 7])": "line 6: x has the shape [4, 6], required is [4, 7]\n    y : f32[4 6] "
                                                "= relu(x as [4 7])",
    HEAD + "  y : f32[4 6] = relu(x as f31[4 6])": f"line 6: no dtype 'f31'; dtypes are {', '.join(DTYPES)}\n    y : "
                                                   f"f32[4 6] = relu(x as f31[4 6])",
    HEAD + "  y : f32[4 6] = relu(p as [4 6])": "line 6: p has several tensors; require a Layout of its elements\n    "
                                                "y : f32[4 6] = relu(p as [4 6])",
    HEAD + "  y : f32[4 6] = all_gather(x as [4 6], 0, dp)": "line 6: only ops and results of placed and explicit "
                                                             "programs require a Layout with 'as'; transfers accept "
                                                             "any Layout\n    y : f32[4 6] = all_gather(x as [4 6], "
                                                             "0, dp)",
    HEAD + "  y : f32[4 6] = all_gather(p, 0, dp)": "line 6: all_gather takes one tensor; p has several\n    y : "
                                                    "f32[4 6] = all_gather(p, 0, dp)",
    HEAD + "  y : f32[4 6] = all_gather()": "line 6: all_gather takes a value first, as in all_gather(x)\n    y : "
                                            "f32[4 6] = all_gather()",
    HEAD + "  y : f32[4 6] = all_gather(x, 0)": "line 6: all_gather: missing a required argument: 'axis'\n    y : "
                                                "f32[4 6] = all_gather(x, 0)",
    HEAD + "  y : f32[2] = p[2]": "line 6: p has 2 elements: there is no p[2]\n    y : f32[2] = p[2]",
    "program local on dp=2 at dp=0\n  x : f32[4/dp] = "
    "input": "line 2: a local program has the sizes of one rank, without '/axis', '+axis' or '@stage'\n    x : "
             "f32[4/dp] = input",
    "program scheduled on dp=2 at dp=0\n  x : f32[4] +dp = "
    "input": "line 2: a scheduled program has the sizes of one rank, without '/axis', '+axis' or '@stage'\n    x : "
             "f32[4] +dp = input",
    "program local on dp=2 at dp=0\nstage s on dp=2\n  x : f32[4] @s = "
    "input": "line 3: a local program has the sizes of one rank, without '/axis', '+axis' or '@stage'\n    x : f32[4] "
             "@s = input",
    "program placed\n  x : f32[4] = "
    "input": "line 2: a value is placed, but the header names no mesh, as in 'on dp=2 tp=2'\n    x : f32[4] = input",
}  # fmt: skip


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_the_line_and_what_is_wrong(text: str) -> None:
    with pytest.raises(TextError) as caught:
        Program.parse(text)
    if ERRORS[text] is None:  # torch says why
        assert re.match(r"line 4: (no device|these elements make no tensor): .+\n    y : ", str(caught.value))
    else:
        assert str(caught.value) == ERRORS[text]


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([DENSE, *(path.read_text() for path in sorted(FOLDER.glob("*.txt")))]), st.data())
def test_noise_is_refused_with_a_line_number_or_read(text: str, data: st.DataObject) -> None:
    """Nothing but TextError comes out of the parser."""
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.sampled_from([0, 1, 1, 2, 9])))
        noise = data.draw(st.sampled_from(["", " ", "(", ")", "[", "]", ",", "=", "/", "+", "@", "?", ":", "'", "#",
                                           "\n", "1e5", "-1", "-inf", "x", "as", "on", "start", "None", "f32", "é",
                                           "\\", "'\\x'", "constant('a')", "complex(1)", "device('z')", "state(x)",
                                           "\t"]))  # fmt: skip
        text = text[:start] + noise + text[end:]
    try:
        program = Program.parse(text)
    except TextError as error:
        assert re.match(r"line \d+: .|an empty text", str(error))
    else:
        assert Program.parse(str(program)) == program


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_names(name: str) -> None:
    assert not can_name(name)
    with pytest.raises(TextError, match=r"^line 2: "):
        Program.parse(f"program traced\n  {name} : f32[2] = input\n")
    if name not in ("return", "grad", "state"):  # these begin lines of their own
        with pytest.raises(TextError, match=f"'{name}' cannot name a value; it has a meaning of its own"):
            Program.parse(f"program traced\n  {name} : f32[2] = input\n")


@pytest.mark.simulated
@settings(max_examples=200, deadline=None)
@given(
    st.from_regex(r"[a-z_]{1,8}[0-9_]{0,3}", fullmatch=True)
    | st.sampled_from(["float", "input", "nan", "inf", "device", "pytree", "fx_pytree", "None", "_", "x_1"])
)
def test_fx_keeps_the_names_that_can_be(name: str) -> None:
    graph = fx.Graph()
    graph.placeholder("before")
    if can_name(name) and name != "before":
        assert graph.create_node("placeholder", name, name=name).name == name
    assert can_name(f"{legal_name(name)}_1")
