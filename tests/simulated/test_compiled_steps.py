"""In one process: compiled steps and calls have the numbers of uncompiled ones; what is refused, and how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import compiled_steps
import pytest
import torch
from reported_inputs import RIGHT, SETTINGS, together, trained
from torch import nn

import autopar
from autopar import Mesh, Program
from autopar.errors import CompileError
from autopar.runtime.lowering.lower import lower
from autopar.runtime.lowering.regions import Regions

pytestmark = pytest.mark.long


def test_steps_and_calls() -> None:
    """Layers that are alike share what is compiled; equal gradients keep memory of their own."""
    step = compiled_steps.alike({"dp": 1}, "ddp", torch.float64, 1e-10, dropout=0.3)
    regions = step.parallel.regions
    assert 0 < regions.distinct < regions.count
    assert re.fullmatch(
        rf"{regions.count} regions, of which {regions.distinct} were compiled in \d+\.\d s", str(regions)
    )
    other = compiled_steps.made({"dp": 1}, "ddp", torch.float64, False)
    other.parallel.load_state_dict(step.parallel.state_dict())
    losses = []
    for parallel in (step.parallel, other.parallel):
        parallel.zero_grad()
        parallel.eval()
        losses.append(parallel(**compiled_steps.batch(5, torch.float64)))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-10, atol=0)
    for p, q in zip(step.parallel.parameters(), other.parallel.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-14)


def test_low_precision() -> None:
    """Inductor computes in the dtypes that amp says; it rounds less often between them."""
    compiled_steps.alike({"dp": 1}, "ddp", torch.float32, 2e-2, amp="bf16-O1")


def test_inputs_of_reports() -> None:
    trained(together(RIGHT), SETTINGS["compile"])


TWICE = """\
program local on dp=1 at dp=0
  x : f64[4 4] = input
forward:
  tanh : f64[4 4] = tanh(x)
  exp : f64[4 4] = exp(tanh)
  exp_1 : f64[4 4] = exp(tanh)
  t : f64[4 4] = t(exp)
  return exp, exp_1, t
"""


def once(module: Any, **_: Any) -> Any:
    """Stands for torch.compile, and computes equal results once."""

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, _, view = module(x)
        return one, one, view

    return call


@pytest.mark.parametrize("compiler", [torch.compile, once])
def test_equal_results_have_memory_of_their_own(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may compute equal results once, and a later line may write to one of them."""
    monkeypatch.setattr(torch, "compile", compiler)
    regions = Regions()
    made = lower(Program.parse(TWICE), {}, regions=regions)["forward"]
    x = torch.randn(4, 4, dtype=torch.float64)
    for _ in range(2):
        one, other, view = made.run([x])
        torch.testing.assert_close(one, x.tanh().exp(), rtol=1e-12, atol=0)
        assert torch.equal(one, other) and torch.equal(view, one.t())
        other.add_(1)
        assert torch.equal(one, view.t()) and not torch.equal(one, other)
    assert (regions.count, regions.distinct) == (1, 1)


ALIKE = """\
program local on dp=1 at dp=0
  x : f64[4 4] = input
  y : f64[4 4] = input
forward:
  tanh : f64[4 4] = tanh(x)
  exp : f64[4 4] = exp(tanh)
  bernoulli : f64[4 4] = bernoulli.p(exp, 0.5)
  tanh_1 : f64[4 4] = tanh(y)
  exp_1 : f64[4 4] = exp(tanh_1)
  return exp, bernoulli, exp_1
"""


def test_regions_that_are_alike_are_compiled_once() -> None:
    """A random op stands between them, and is called as it is."""
    regions = Regions()
    program = Program.parse(ALIKE)
    made, plain = lower(program, {}, regions=regions)["forward"], lower(program, {})["forward"]
    tensors = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    results = []
    for function in (made, plain):
        torch.manual_seed(3)
        results.append(function.run([*tensors]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
    assert (regions.count, regions.distinct) == (2, 1)
    made.run([tensors[0].t(), tensors[1]])
    assert regions.distinct == 1, "other strides are torch's own guard"


@pytest.mark.parametrize("variable", [None, "no-such-compiler"])
def test_without_a_compiler(variable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    looked = "no g++ (PATH)"
    if variable:
        monkeypatch.setenv("CXX", variable)
        looked = "no no-such-compiler (CXX)"
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(CompileError) as error:
        autopar.parallelize(nn.Linear(2, 2), Mesh(dp=1), compile=True)
    assert str(error.value) == (
        f"compile=True needs a C++ compiler, and there is {looked}: install g++, set CXX to a compiler, or leave "
        "compile=True out"
    )


def test_a_region_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(module: Any, **_: Any) -> Any:
        def call(*_: Any) -> None:
            raise RuntimeError("no kernel\nmore lines")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    made = lower(Program.parse(TWICE), {}, regions=Regions())["forward"]
    with pytest.raises(
        CompileError, match=r"^Inductor cannot compile the forward of the model: no kernel\n  leave comp"
    ):
        made.run([torch.randn(4, 4, dtype=torch.float64)])


def test_compile_is_a_switch() -> None:
    with pytest.raises(TypeError, match="compile='yes' is neither True nor False"):
        autopar.parallelize(nn.Linear(2, 2), Mesh(dp=1), compile="yes")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_torch_compile_around_a_model_on_a_mesh() -> None:
    """It runs the call as it is, also inside of a function; with ``fullgraph=True`` torch refuses it."""
    parallel = autopar.parallelize(nn.Linear(4, 3).double(), Mesh(dp=1))
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = parallel(x)
    assert torch.equal(torch.compile(parallel)(x), expected)
    inside = torch.compile(lambda x: parallel(x) * 2)(x)
    torch.testing.assert_close(inside, expected * 2, rtol=1e-12, atol=0)
    inside.sum().backward()
    torch.testing.assert_close(parallel.module.weight.grad, 2 * x.sum(0).expand(3, 4), rtol=1e-12, atol=0)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="Dynamo"):  # in torch's own words
        torch.compile(parallel, fullgraph=True)(x)
