"""The price of a plan as an expression: it is the price at the captured sizes and at others, and it is solved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Mesh, PlanError
from autopar.costs.machine import Machine, machine
from autopar.costs.program_price import node_prices
from autopar.ir import transfers
from autopar.search.solutions.solution import Solution
from autopar.search.symbols.crossovers import pieces_of
from autopar.search.symbols.expression import Expression, Priced, expression_of

H100 = machine("NVIDIA H100 80GB HBM3")
NODE_OF_TWO = replace(H100, ranks_per_node=2)


class Attention(nn.Module):
    """Rows of ids, heads, and a flattened batch × sequence; its sizes are all 16 on purpose where they can be."""

    def __init__(self, hidden: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.table = heads, nn.Embedding(64, hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + torch.arange(ids.shape[1], device=ids.device)[None, :, None] / 100
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, self.heads, -1).transpose(1, 2).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        later = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(self.out(y).view(b * s, -1), later.reshape(-1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def ids(batch: int, sequence: int) -> dict[str, torch.Tensor]:
    tokens = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    return {"ids": tokens, "labels": tokens}


def of_preset(parallel: Any, on: Machine) -> Expression:
    """The expression of a plan that was not searched."""
    at = parallel._calls.captures.latest.captured.at_sizes
    return expression_of(Priced(((1, parallel.program),), on, at.shapes, at.integers, at))


def moves(program: Any) -> list[Any]:
    return [node.target for node in program.nodes if node.target in transfers.BY_FUNCTION]


@pytest.mark.long
@pytest.mark.parametrize(("plan", "on"), [
    ("ddp", NODE_OF_TWO), ("fsdp", H100), ("fsdp", machine("cpu")), ("ddp", machine("generic")),
    *(pytest.param(*case, marks=pytest.mark.sweep("each machine has the other plan"))
      for case in [("fsdp", NODE_OF_TWO), ("ddp", H100), ("ddp", machine("cpu")), ("fsdp", machine("generic"))]),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_at_other_sizes_it_is_the_price_there(plan: str, on: Machine) -> None:
    """With the same transfers, which presets have at all sizes."""
    with torch.device("meta"):
        model, mesh = Attention(), Mesh(dp=2, tp=2)
    first = autopar.parallelize(model, mesh, plan, example=ids(16, 16), machine=on)
    expression = of_preset(first, on)
    for batch, sequence in ((16, 16), (64, 16), (16, 48), (32, 128), (4, 8)):
        there = autopar.parallelize(model, mesh, plan, example=ids(batch, sequence), machine=on)
        assert moves(there.program) == moves(first.program)
        nanoseconds = autopar.price(there.program, on).nanoseconds
        ops = sum(cost > 0 for _, cost in node_prices(there.program, on))
        assert expression.at(batch=batch, sequence=sequence) * 1e9 == pytest.approx(nanoseconds, abs=ops / 2 + 1)
    quick = expression.at(batch=64, inside_bandwidth=1e30, outside_bandwidth=1e30, memory_bandwidth=1e30)
    assert quick < expression.at(batch=64)


@pytest.mark.long
def test_of_a_searched_plan_and_a_step() -> None:
    with torch.device("meta"):
        model = Attention()
    solution = autopar.parallelize(model, Mesh(a=2, b=2), example=ids(8, 32), machine=H100).solution
    assert solution is not None
    expression = solution.expression()
    assert {symbol.name: value for symbol, value in expression.values.items()} == {
        "batch": 8, "sequence": 32, "memory_bandwidth": 3.35e12, "inside_bandwidth": 4.5e11, "outside_bandwidth": 5e10,
    }  # fmt: skip
    assert expression.at() * 1e9 == pytest.approx(solution.nanoseconds, abs=expression.terms / 2)
    parallel = autopar.parallelize(model, Mesh(a=2, b=2), "search", machine=H100)
    step = parallel.train_step(torch.optim.AdamW(parallel.parameters()), microbatches=2)
    step.capture(ids(16, 32))
    assert step.solution is not None
    expression = step.solution.expression()
    assert expression.at() * 1e9 == pytest.approx(step.solution.nanoseconds, abs=expression.terms / 2)
    assert [value for symbol, value in expression.values.items() if symbol.name == "batch"] == [16]
    assert expression.at(batch=32) > expression.at()


def mlp_plan(batch: int, mesh: Mesh = Mesh(a=4)) -> Solution:  # noqa: B008
    with torch.device("meta"):
        found = autopar.parallelize(MLP(), mesh, example=(torch.empty(batch, 1024),), machine=H100).solution
    assert found is not None and found.exact
    return found


@pytest.mark.simulated
def test_searches_at_both_sides_of_a_crossover_confirm_it() -> None:
    small, large = mlp_plan(1 << 13), mlp_plan(1 << 14)
    (cross,) = small.crossovers("batch", large)
    assert 1 << 13 < cross.at < 1 << 14 and not cross.cheaper_above
    (back,) = large.crossovers("batch", small)
    assert back.at == pytest.approx(cross.at) and back.cheaper_above
    below, above = 4 * math.floor(cross.at / 4), 4 * math.ceil(cross.at / 4)
    ours, theirs = small.expression(), large.expression()
    assert ours.at(batch=cross.at) == pytest.approx(theirs.at(batch=cross.at), rel=1e-12)
    for batch, plan, expression in ((below, small, ours), (above, large, theirs)):
        found = mlp_plan(batch)
        assert found.values["param up.weight"] == plan.values["param up.weight"], "it is the same plan"
        assert found.nanoseconds == pytest.approx(expression.at(batch=batch) * 1e9, abs=expression.terms / 2)
    assert small.crossovers("batch", small) == []


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("symbol", "mesh"), [("inside_bandwidth", Mesh(a=16)), ("memory_bandwidth", Mesh(a=4))], ids=str
)
def test_crossovers_in_a_bandwidth(symbol: str, mesh: Mesh) -> None:
    """Of a plan on four ranks and one for a larger batch, or on more ranks."""
    one, other = mlp_plan(1 << 13), mlp_plan(1 << 14, mesh)
    found = one.crossovers(symbol, other)
    ours, theirs = one.expression(), other.expression()
    batch = ours.values[ours.symbol("batch")]

    def difference(at: float) -> float:
        values = {symbol: at}
        return (ours.at(**values) - theirs.at(**values, batch=batch)) / ours.at(**values)

    assert found
    for cross in found:
        assert abs(difference(cross.at)) < 1e-9
        signs = [difference(cross.at * part) < 0 for part in (0.999, 1.001)]
        assert signs == [not cross.cheaper_above, cross.cheaper_above]
    assert [cross.at for cross in found] == sorted(cross.at for cross in found)
    ends = [difference(at) < 0 for at in (found[0].at / 100, found[-1].at * 100)]
    assert (ends[0] != ends[1]) == (len(found) % 2 == 1)


@pytest.mark.simulated
def test_uneven_pieces_are_rounded_up() -> None:
    with torch.device("meta"):
        model, mesh = nn.Linear(1024, 512, bias=False), Mesh(dp=4)
        parallel, other = (
            autopar.parallelize(model, mesh, "ddp", example=(torch.empty(batch, 1024),), machine=H100)
            for batch in (6, 1023)
        )
    expression = of_preset(parallel, H100)
    price = autopar.price(other.program, H100).nanoseconds
    assert expression.at(batch=1023) * 1e9 == pytest.approx(price, abs=expression.terms / 2)
    batch = expression.symbol("batch")
    alone = expression.seconds.subs({s: value for s, value in expression.values.items() if s != batch})
    with pytest.raises(PlanError, match=r"no polynomial in batch on any interval, for it has ceiling\(batch/4\)"):
        pieces_of(alone, batch)


class Square(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum() + x[: x.shape[0] * x.shape[0] // 12].sum()


class Branch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.relu() if x.shape[0] > 10 else y.sigmoid()


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.places


@pytest.mark.simulated
@pytest.mark.parametrize(
    ("model", "marks", "text"),
    [
        (Square(8, 8), None, r"slice_1 \(test_expressions.py:\d+ .*: its sizes 5, 16, 24 are not affine in batch"),
        (Branch(8, 8), None, r"sigmoid \(test_expressions.py:\d+ .*: at other sizes the model runs other ops; "),
        (Fixed(), None, r"the model takes no inputs of the sizes x \[16, 8\]: .* broadcast"),
        (nn.Linear(8, 8), {"y": ("batch",)}, "there is no input 'y'; there are input"),
        (nn.Linear(8, 8), {"input": ("batch",)}, r"the marks \('batch',\) of input are not one for each of its dims"),
        (nn.Linear(8, 8), {"input": (3, None)}, "have something that is no name of a symbol"),
        (nn.Linear(8, 8), {"input": (None, None)}, "no dim of an input has a symbol"),
        (nn.Bilinear(4, 8, 3), {"input1": ("n", "n"), "input2": ("n", None)}, "n has the sizes 8 and 4, the latter in"),
    ],
)  # fmt: skip
def test_what_has_no_expression(model: nn.Module, marks: Any, text: str) -> None:
    example = (torch.ones(8, 4), torch.ones(8, 8)) if isinstance(model, nn.Bilinear) else (torch.ones(8, 8),)
    solution = autopar.parallelize(model, Mesh(a=2), example=example).solution
    assert solution is not None
    with pytest.raises(PlanError, match=text):
        solution.expression(marks)


@pytest.mark.simulated
def test_questions_that_have_no_answer(tmp_path: Any) -> None:
    small = mlp_plan(16)
    with pytest.raises(PlanError, match="there is no symbol 'sequence'; there are batch, memory_bandwidth, "):
        small.crossovers("sequence", small)
    small.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="the plan has no expression, because it is not applied in this process"):
        autopar.search.solutions.artifact.load(tmp_path / "plan.json").expression()


affine = st.tuples(st.integers(0, 50), st.integers(0, 20))


@given(st.lists(st.tuples(st.sampled_from(["Max", "Min"]), st.lists(affine, min_size=2, max_size=4)), min_size=1,
                max_size=4))  # fmt: skip
def test_pieces_have_the_values_of_the_expression(terms: list[tuple[str, list[tuple[int, int]]]]) -> None:
    x = sympy.Symbol("x", positive=True)
    kinds = {"Max": sympy.Max, "Min": sympy.Min}
    total = sympy.Add(*(kinds[kind](*(a + b * x for a, b in lines)) for kind, lines in terms))
    pieces = pieces_of(total, x)
    for at in (0.25, 0.5, 1.0, 2.25, 3.5, 10.0, 51.0, 1000.0):
        polynomial = next(p for start, p in reversed(pieces) if start <= at)
        value = sum(c * at**k for k, c in enumerate(polynomial))
        assert value == pytest.approx(float(total.subs(x, at)), rel=1e-9, abs=1e-9)
