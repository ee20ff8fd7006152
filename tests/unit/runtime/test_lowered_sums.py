"""Gradients are added to their sums in place, and a product is added as it is computed where that is the same."""

from __future__ import annotations

import re

import pytest
import torch

from autopar.ir.program import Program
from autopar.runtime.anomaly import Hunt
from autopar.runtime.lowering.lower import lower
from autopar.scheduling.programs.donated import Donated

ADJACENT = "  p : f64[4 3] = mm(t, x)\n  w_next : f64[4 3] = add.Tensor(w, p)\n"
APART = "  p : f64[4 3] = mm(t, x)\n  c : f64[2 4] = relu(g)\n  w_next : f64[4 3] = add.Tensor(w, p)\n"
READ_TWICE = "  p : f64[4 3] = mm(t, x)\n  w_next : f64[4 3] = add.Tensor(w, p)\n  c : f64[4 3] = relu(p)\n"
TWO_PHASES = "  p : f64[4 3] = mm(t, x)\nweight_gradients:\n  w_next : f64[4 3] = add.Tensor(w, p)\n"


def program(lines: str, wide: str = "f64") -> Program:
    returned = "  return c\n" if " c :" in lines else "  return g\n"
    return Program.parse(
        f"program local on dp=1 at dp=0\n  w : {wide}[4 3] = state(w_next)\n  g : f64[2 4] = input\n"
        f"  x : f64[2 3] = input\nbackward:\n  t : f64[4 2] = t(g)\n{lines}{returned}"
    )


def run(made: Program, hunt: Hunt | None = None, zeros: tuple[str, ...] = ()) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The next sum, the memory of the old one afterwards, and the code."""
    values = {"w": torch.randn(4, 3).double(), "g": torch.randn(2, 4).double(), "x": torch.randn(2, 3).double()}
    start = {**values, "w": torch.zeros(4, 3).double() if zeros else values["w"].clone()}
    source = ""
    for lowered in lower(made, {}, hunt=hunt, donated=Donated.of(made, ["w"], zeros)).values():
        results = lowered.run([values[name] for name in lowered.takes])
        values |= dict(zip(lowered.gives, results, strict=True))
        source += lowered.graph.python_code("self").src
    expected = start["w"] + start["g"].T @ start["x"]
    torch.testing.assert_close(values["w_next"], expected, rtol=1e-14, atol=1e-14)
    return values["w_next"], values["w"], source


@pytest.mark.parametrize(
    ("lines", "fused"), [(ADJACENT, True), (APART, False), (READ_TWICE, False), (TWO_PHASES, False)]
)
def test_a_product_is_added_as_it_is_computed(lines: str, fused: bool) -> None:
    sum, memory, source = run(program(lines))
    assert sum.data_ptr() == memory.data_ptr()
    calls = re.findall(r"aten\.(\w+)\.", source)
    assert ("addmm_" in calls, "mm" in calls, "add_" in calls) == (fused, not fused, not fused)


def test_products_of_batches() -> None:
    made = Program.parse(
        "program local on dp=1 at dp=0\n  w : f64[5 4 3] = state(w_next)\n  g : f64[5 4 2] = input\n"
        "  x : f64[5 2 3] = input\nbackward:\n  p : f64[5 4 3] = bmm(g, x)\n  w_next : f64[5 4 3] = add.Tensor(w, p)\n"
        "  return g\n"
    )
    w, g, x = (torch.randn(shape).double() for shape in ((5, 4, 3), (5, 4, 2), (5, 2, 3)))
    expected, lowered = w + g @ x, lower(made, {}, donated=Donated.of(made, ["w"]))["backward"]
    given = {"w": w, "g": g, "x": x}
    results = dict(zip(lowered.gives, lowered.run([given[name] for name in lowered.takes]), strict=True))
    assert "baddbmm_" in lowered.graph.python_code("self").src
    torch.testing.assert_close(results["w_next"], expected, rtol=1e-14, atol=1e-14)


def test_the_first_product_becomes_the_sum() -> None:
    *_, source = run(program(ADJACENT), zeros=("w",))
    assert re.findall(r"aten\.(\w+)\.", source) == ["t", "mm"]


def test_a_sum_of_another_dtype_is_added_apart() -> None:
    made = program(ADJACENT.replace("w_next : f64", "w_next : f32").replace("p : f64", "p : f64"), "f32")
    assert not Donated.of(made, ["w"]).products


def test_a_search_for_nan_looks_at_the_product() -> None:
    made = program(ADJACENT)
    hunt = Hunt(made)
    hunt.enter("", -1)
    *_, source = run(made, hunt)
    assert re.findall(r"aten\.(\w+)\.", source) == ["t", "mm", "add_"]


def test_an_error_quotes_the_product() -> None:
    made = program(ADJACENT)
    lowered = lower(made, {}, donated=Donated.of(made, ["w"]))["backward"]
    given = {"w": torch.zeros(4, 3).double(), "g": torch.zeros(2, 4).double(), "x": torch.zeros(3, 3).double()}
    with pytest.raises(RuntimeError) as found:
        lowered.run([given[name] for name in lowered.takes])
    assert any("p : f64[4 3] = mm(t, x)" in note for note in found.value.__notes__)
