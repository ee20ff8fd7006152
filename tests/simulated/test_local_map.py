"""A function on the pieces of each rank has the numbers of the function, for each placement that it may have."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from local_maps import PRODUCT, Product, X, compared
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, experimental

import autopar
from autopar import CaptureError, Mesh, RuleError

SPLITS = [dict(zip(("p", "q"), pair, strict=True)) for pair in itertools.product(PRODUCT, repeat=2)]
MATRIX = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: "-".join(splits.values()))
def test_all_placements_have_the_numbers_of_the_function(splits: dict[str, str]) -> None:
    mesh = Mesh(p=2, q=3)

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parallel = autopar.parallelize(model, mesh, {"x": ("p", None), "*.w": ("q", None)}, example=(x,))
        assert "autopar::local_map(" in str(parallel.program) and "autopar::local_map_backward(" in str(
            parallel.program
        )
        return parallel.simulate(x)

    for name, (ours, theirs) in compared(splits, run).items():
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("splits", [{"p": "b", "q": "a"}, {"p": "c", "q": "x"}])
def test_a_search_keeps_the_placements(splits: dict[str, str]) -> None:
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return autopar.parallelize(model, Mesh(p=2, q=2), "search", example=(x,)).simulate(x)

    for ours, theirs in compared(splits, run).values():
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_trains_and_other_sizes_are_captured(count: int) -> None:
    model, plain = Product({"p": "a", "q": "b"}), Product({}, mapped=False)
    parallel = autopar.parallelize(model, Mesh(p=2, q=2), {"x": ("p", None)}, dynamic=True)
    for rows in (5, 3, 4):
        torch.testing.assert_close(parallel.simulate(X[:rows]), plain(X[:rows]), rtol=1e-10, atol=1e-12)

    class Loss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    losses = Loss(model), Loss(plain)
    parallel = autopar.parallelize(losses[0], Mesh(p=2, q=2), {"x": ("p", None)})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=count)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        expected = losses[1](X[:4])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step.simulate(X[:4]), expected.detach(), rtol=1e-9, atol=1e-12)


class Of(nn.Module):
    """Calls one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * self.w)


def parallel_of(function: Callable[..., Any], **mesh: int) -> Any:
    return autopar.parallelize(Of(function), Mesh(**(mesh or {"tp": 2})), {}, example=(MATRIX,))


def test_a_function_that_mixes_rows_is_told_of_micro_batches() -> None:
    whole = autopar.local_map(lambda x: x - x.amax(0), {"tp": Shard(1)}, ({"tp": Shard(1)},))

    class Loss(Of):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    parallel = autopar.parallelize(Loss(whole), Mesh(dp=2, tp=2), {})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=2)
    with pytest.warns(UserWarning, match="not the loss of the whole batch: one of its terms is not a sum"):
        step.simulate(MATRIX)


ROWS_SPLIT = ({"dp": Shard(0), "tp": Shard(1)},)


@pytest.mark.parametrize(
    ("function", "results"),
    [
        (lambda x: x.sum(0), {"tp": Shard(0)}),  # of its rows; forgotten: Partial() over dp
        (lambda x: (x.sum(0), x * 2), ({"tp": Shard(0)}, ROWS_SPLIT[0])),
        (lambda x: x.mean((0, 1)), {"dp": Partial()}),  # forgotten over tp
        (lambda x: x.sum(1).square(), {"dp": Shard(0)}),  # no sum at all
    ],
)
def test_ranks_that_have_promised_one_value_are_compared(function: Any, results: Any) -> None:
    of_pieces = autopar.local_map(function, results, ROWS_SPLIT)

    class Read(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = of_pieces(x)
            return torch.tanh(first[0] if isinstance(first, tuple) else first)

    parallel = autopar.parallelize(Read(), Mesh(dp=2, tp=2), {}, example=(MATRIX,))
    with pytest.raises(autopar.SimulationError) as caught:
        parallel.simulate(MATRIX)
    text = str(caught.value)
    assert "of the same piece, which a function of local_map returns\n    local_map : " in text
    assert "test_local_map.py:" in text and "first = of_pieces(x)" in text and text.endswith("where they add up")


def test_placements_in_the_order_of_the_axes() -> None:
    rows = autopar.local_map(torch.cumsum, [Shard(0), Replicate()], ([Shard(0), Replicate()], None))
    parallel = parallel_of(lambda x: rows(x, 1), dp=2, tp=2)
    torch.testing.assert_close(parallel.simulate(MATRIX), MATRIX.cumsum(1))
    assert "local_map : (f64[8/dp 6]) = autopar::local_map([mul], 'cumsum')" in str(parallel.program)


def test_whole_runs_on_a_single_device() -> None:
    """A mean of a piece is no mean of the whole: the function is told the number of all rows."""

    def shares(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0) / 8

    @autopar.local_map(out_placements={"tp": Partial()}, in_placements=({"tp": Shard(0)},), whole=lambda x: x.mean(0))
    def mean(x: torch.Tensor) -> torch.Tensor:
        return shares(x)

    torch.testing.assert_close(mean(MATRIX), MATRIX.mean(0))
    torch.testing.assert_close(parallel_of(mean).simulate(MATRIX), MATRIX.mean(0))


def test_results_without_gradients() -> None:
    both = autopar.local_map(lambda x: (x.argmax(1), x.max(1).values), ({"tp": Shard(0)},) * 2, ({"tp": Shard(0)},))
    model = Of(both)
    places, values = autopar.parallelize(model, Mesh(tp=2), {}, example=(MATRIX,)).simulate(MATRIX)
    assert torch.equal(places, MATRIX.argmax(1))
    torch.testing.assert_close(values, MATRIX.max(1).values)
    values.sum().backward()
    found, model.w.grad = model.w.grad, None
    model(MATRIX)[1].sum().backward()
    torch.testing.assert_close(found, model.w.grad)


def test_gradients_that_do_not_follow_are_refused() -> None:
    rows = {"tp": Shard(0)}
    right = autopar.local_map(torch.sin, rows, (rows,), (rows,))
    parallel_of(right)
    wrong = autopar.local_map(torch.sin, rows, (rows,), ({"tp": Replicate()},))
    with pytest.raises(RuleError, match=r"in_grad_placements of sin says .*of argument 0, and its gradient is .*\n.*\n"
                                        r"  leave in_grad_placements out"):  # fmt: skip
        parallel_of(wrong)


ROWS, COLUMNS, SUM = {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Partial()}
NOISE = nn.Parameter(torch.ones(6, dtype=torch.float64))
local_map = autopar.local_map
REFUSED: list[tuple[type[Exception], Callable[[], Any], str]] = [
    (RuleError, lambda: local_map(lambda x: x[:2], ROWS, (ROWS,)),
     r"makes pieces of \[2, 6\] on the rank at \{'tp': 0\}, and its out_placements say \[1, 6\]\n.*\n  correct"),
    (RuleError, lambda: local_map(torch.sin, {"cp": Shard(0)}, (ROWS,)),
     r"sin has a placement for the axis cp, and the mesh \(tp=2\) has none of that name"),
    (RuleError, lambda: local_map(torch.sin, [Shard(0)] * 2, (ROWS,)),
     "sin: 2 placements for the axes tp; give one"),
    (RuleError, lambda: local_map(torch.sin, {"tp": Partial("max")}, (ROWS,)),
     "a partial result of local_map is a sum"),
    (RuleError, lambda: local_map(torch.sin, ROWS, (SUM,)),
     "sin takes a Partial operand over tp, and not all of its"),
    (CaptureError, lambda: local_map(torch.bernoulli, ROWS, (ROWS,)),
     "bernoulli draws random numbers with .*\n  draw them outside of local_map, and pass them in"),
    (CaptureError, lambda: local_map(lambda x: x * NOISE, ROWS, (ROWS,)),
     "uses a tensor from outside that requires a gradient, which would be lost\n  pass it as an argument"),
    (CaptureError, lambda: local_map(lambda x: x @ x, ROWS, (ROWS,)),
     r"fails on tensors of \[8, 6\]: RuntimeError: .*\n  it may use what it is given alone"),
    (CaptureError, lambda: local_map(lambda x: (x, 1), (ROWS, ROWS), (ROWS,)),
     "returns an int; a function of local_map"),
    (CaptureError, lambda: local_map(lambda x: (x, x), ROWS, (ROWS,)),
     "returns 2 results, and out_placements has 1"),
    (CaptureError, lambda: local_map(torch.sin, ROWS, (ROWS,), whole=torch.sum),
     "whole= of sin returns other shapes"),
    (TypeError, lambda: local_map(torch.sin, ROWS, (ROWS, ROWS)),
     "sin is called with 1 arguments, and in_placements has 2"),
    (TypeError, lambda: local_map(torch.sin, ROWS, (None,)),
     "argument 0 of sin is a tensor, and its placements are None"),
    (TypeError, lambda: local_map(torch.sin, ROWS, ("tp",)), "'tp' are no placements; write a dict of axes"),
    (TypeError, lambda: local_map(torch.sin, ROWS), "takes the placements of the results and of each argument"),
    (TypeError, lambda: local_map(torch.sin, ROWS, (ROWS,), redistribute_inputs=False),
     "takes neither a device_mesh"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "make", "words"), REFUSED)
def test_what_is_refused(kind: type[Exception], make: Callable[[], Any], words: str) -> None:
    with pytest.raises(kind, match=words):
        parallel_of(make())


def test_the_signature_is_that_of_torch() -> None:
    theirs = list(inspect.signature(experimental.local_map).parameters)
    assert list(inspect.signature(autopar.local_map).parameters) == [*theirs, "whole"]
