"""Floats that forward reads: one that changes again and again becomes an input of the program."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from casts import promoted_casts  # noqa: F401
from equality import TOLERANCE, relative
from guarded_models import Weighted
from torch import nn

import autopar
from autopar import Mesh

d = torch.float64


def trained(
    model: nn.Module, values: list[Any], change: Callable[[nn.Module, Any], None], x: torch.Tensor, **options: Any
) -> tuple[autopar.Parallel, Any]:
    """Steps beside eager, a value for each; the losses and the parameters are the same, of ``simulate`` too."""
    theirs = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), **options)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for value in values:
        change(model, value)
        change(theirs, value)
        optimizer.zero_grad()
        loss = theirs(x)
        loss.backward()
        assert relative(parallel.simulate(x), loss) <= TOLERANCE
        optimizer.step()
        assert relative(step.simulate(x), loss) <= TOLERANCE
        for (name, ours), expected in zip(model.named_parameters(), theirs.parameters(), strict=True):
            assert relative(ours, expected) <= TOLERANCE, name
    return parallel, step


def set_beta(model: nn.Module, value: Any) -> None:
    model.beta = value


ALONE = pytest.mark.sweep("the option is there beside another one")


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatches": 2, "recompute": "*l", "zero": 1},
        pytest.param({"microbatches": 2}, marks=ALONE),
        pytest.param({"recompute": "*l"}, marks=ALONE),
        pytest.param({"zero": 1}, marks=ALONE),
    ],
    ids=str,
)
def test_a_float_that_anneals_becomes_an_input(options: dict[str, Any]) -> None:
    """Its first change is captured anew, and its second makes it an input: there are no more captures, whatever it is
    then."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=d)
    parallel, step = trained(Weighted(), [0.0, 0.1, 0.2, 0.3, 1e9, 0.0, -2.5, 0.1], set_beta, x, **options)
    assert parallel.captures == step.captures == 3
    assert "beta : f64[] = input('.beta')" in str(parallel.program) and "beta : f64[] = input('.beta')" in str(
        step.program
    )


class WithFloat(nn.Module):
    """A loss of a layer's output and a float."""

    def __init__(self, loss: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__()
        self.l, self.beta, self.loss = nn.Linear(4, 4, dtype=d), 0.0, loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.l(x), self.beta)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, beta: y.square().sum() * (beta / len(y)),
        lambda y, beta: y.square().sum() / (beta * len(y) + 1e-9 * len(y)),
        lambda y, beta: y.square().sum() * beta / len(y),
        lambda y, beta: y.square().mean() * (beta * len(y)),
        lambda y, beta: y.square().mean() + (beta / len(y)) * y.sum(),
        lambda y, beta: y.square().mean() + (2 - beta) * y.mean(),
    ],
    ids=["mean", "by", "apart", "sum", "added", "plain"],
)
def test_a_float_beside_the_number_of_rows(loss: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    """Its input grows with the rows, or as their inverse, also where it is 0 when it becomes an input."""
    torch.manual_seed(0)
    model = WithFloat(loss)
    alone, x = copy.deepcopy(model), torch.randn(8, 4, dtype=d)
    step = autopar.parallelize(model, Mesh(dp=2)).train_step(
        torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2
    )
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for beta in (0.4, 0.1, 0.0, 0.3, 0.2):
        model.beta = alone.beta = beta
        ours, expected = step.simulate(x), alone(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(ours, expected.detach())
    torch.testing.assert_close(dict(model.named_parameters()), dict(alone.named_parameters()))
    assert step.captures == 3 and "input('.beta')" in str(step.program)


def test_a_step_shows_the_program_with_the_input_at_once() -> None:
    """The input is no part of the batch by which the shown program is chosen."""
    model, x = Weighted(), torch.randn(4, 4, dtype=d)
    step = autopar.parallelize(model, Mesh(dp=2), "ddp").train_step(torch.optim.SGD(model.parameters(), lr=0.1))
    for beta in (0.1, 0.1, 0.2, 0.3):
        model.beta = beta
        step.simulate(x)
    assert step.captures == 3 and "input('.beta')" in str(step.program) and "beta is 0.3" in str(step.reports)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, beta: y.square().mean() * (beta / len(y) ** 0.5),
        lambda y, beta: (y * (beta / len(y))).square().mean(),
        lambda y, beta: (y * (k := beta / len(y))).square().sum() * k,
        lambda y, beta: y.square().mean() + (beta + len(y)),
    ],
    ids=["root", "inside", "inside and outside", "added"],
)
def test_what_follows_from_a_float_and_the_rows_is_told(loss: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    """With the line of its first use."""
    model, x = WithFloat(loss), torch.randn(8, 4, dtype=d)
    step = autopar.parallelize(model, Mesh(dp=2)).train_step(
        torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2
    )
    for beta in (0.4, 0.1, 0.2):
        model.beta = beta
        with pytest.warns(
            UserWarning, match=r"one of its numbers follows from the number of rows[^\n]*\n +test_guards_floats"
        ):
            step.simulate(x)
    assert step.captures == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_that_is_an_input_is_none_of_a_dtype(dtype: torch.dtype) -> None:
    """Results have the dtypes and the bits that they have with a Python number: of low precision, of whole numbers, of
    single numbers."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.beta = nn.Linear(4, 4, dtype=dtype), 0.0

        def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
            y = self.l(x)
            return (
                y * self.beta,
                self.beta - y,
                n * self.beta,
                n.sum() / self.beta,
                n > self.beta,
                y.float().sum() * self.beta,
                self.beta / n,
            )

    model, x, n = Mixed(), torch.randn(4, 4, dtype=dtype), torch.arange(1, 5)
    parallel = autopar.parallelize(model, Mesh(dp=1))
    for beta in (0.1, 0.2, 0.3, 0.7, 1.3):
        model.beta = beta
        for ours, theirs in zip(parallel(x, n), model(x, n), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert parallel.captures == 3 and "input('.beta')" in str(parallel.program)


OTHERWISE: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda m, x: F.dropout(x, m.beta * 0, True) + x * F.dropout(torch.ones_like(x), m.beta // 10),
    "a branch": lambda m, x: x if m.beta > 0.25 else x * 2,
    "a limit": lambda m, x: x * min(m.beta, 0.25),
    "a function of math": lambda m, x: x * math.exp(m.beta),
    "text": lambda m, x: x * float(f"{m.beta}"),
    "a power": lambda m, x: (x.abs() + 1) ** m.beta,
    "a tensor": lambda m, x: x + torch.tensor(m.beta, dtype=d),
    "an output": lambda m, x: x + len(repr(m.beta)),
    "smoothed labels": lambda m, x: F.cross_entropy(x, x.argmax(1), label_smoothing=m.beta),
}  # fmt: skip


USED = ("a branch", "a function of math", "text", "a tensor", "smoothed labels")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case in USED else pytest.mark.sweep("it fails to trace in the way of one in USED")
        )
        for case in OTHERWISE
    ],
)
def test_a_float_that_is_used_otherwise_is_captured_anew_with_one_warning(case: str) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.beta = nn.Linear(4, 4, dtype=d), 0.1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OTHERWISE[case](self, self.l(x)).sum()

    model, x = Uses(), torch.randn(4, 4, dtype=d)
    parallel = autopar.parallelize(model, Mesh(dp=2))
    for k, beta in enumerate((0.1, 0.2, 0.3, 0.4)):
        model.beta = beta
        if k != 2:
            assert relative(parallel.simulate(x), model(x)) <= TOLERANCE
            continue
        with pytest.warns(UserWarning) as caught:
            assert relative(parallel.simulate(x), model(x)) <= TOLERANCE
        assert len(caught) == 1 and str(caught[0].message).startswith(
            "forward uses beta not only in arithmetic with tensors, and each new value captures the step anew (beta "
            "is 0.3, it was 0.2)\n    test_guards_floats.py:"
        )
    assert parallel.captures == 4 and "input('.beta')" not in str(parallel.program)


class Annealed(nn.Module):
    """A number beside low precision, float32 residuals and a comparison."""

    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m, self.beta = nn.Linear(6, 6), nn.Linear(6, 6), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.l(x) * self.beta
        z = self.m(torch.tanh(y)) / (1.0 + self.beta) - self.beta
        return (z.float() * (z > self.beta - 2.0)).square().mean()


OTHERS = pytest.mark.sweep("each dtype and each level is in one of the two others")


@pytest.mark.long
@pytest.mark.parametrize(
    "amp", ["bf16-O1", "fp16-O2", pytest.param("bf16-O2", marks=OTHERS), pytest.param("fp16-O1", marks=OTHERS)]
)
def test_numbers_that_are_inputs_are_as_exact_under_amp(amp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as where each value is captured as a constant."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def trained() -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = Annealed()
        # no pending sums, which are reduced elsewhere
        parallel = autopar.parallelize(model, Mesh(dp=2, tp=2), {"l.weight": ("tp", None), "m.weight": ("tp", None)})
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), amp=amp, microbatches=2)
        losses = []
        for k in range(4):
            model.beta = 1.0 - k / 7
            losses.append(step.simulate(x).detach())
        return losses + [parameter.detach() for parameter in parallel.parameters()], step.captures

    found, captures = trained()
    monkeypatch.setattr("autopar.capture.guards.variants.can_be_input", lambda place: False)
    with pytest.warns(UserWarning, match="each new value captures the step anew"):
        expected, each = trained()
    assert (captures, each) == (3, 4)
    assert all(map(torch.equal, found, expected))
