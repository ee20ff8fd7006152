"""What a call of a model and a training step share: one binding of the arguments, layouts of parameters, names."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
import autopar.step.train_step  # it is imported late, and the count is of all that is imported
from autopar import Mesh
from autopar.capture.arguments import bind_arguments


class Loss(nn.Module):
    """A mean over the batch, or a sum that is divided by a number of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, num_items_in_batch: Any = None, **others: Any) -> torch.Tensor:
        squares = self.linear(x).square()
        return squares.mean() if num_items_in_batch is None else squares.sum() / num_items_in_batch


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts how often arguments are bound, wherever the function was imported."""
    count = [0]

    def counting(*args: Any) -> Any:
        count[0] += 1
        return bind_arguments(*args)

    for name, module in list(sys.modules.items()):
        if name.startswith("autopar.") and getattr(module, "bind_arguments", None) is bind_arguments:
            monkeypatch.setattr(module, "bind_arguments", counting)
    return count


def sgd(parallel: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(parallel.parameters(), lr=0.1)


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "call": lambda parallel, x: parallel(x),
    "capture": lambda parallel, x: parallel.capture(x),
    "capture of a step": lambda parallel, x: parallel.train_step(sgd(parallel), microbatches=2).capture(x),
    "step": lambda parallel, x: parallel.train_step(sgd(parallel))(x),
    "step of a dict": lambda parallel, x: parallel.train_step(sgd(parallel))({"x": x}),
    "step of micro-batches": lambda parallel, x: parallel.train_step(sgd(parallel), microbatches=4)(x),
    "step with a number of items": lambda parallel, x: parallel.train_step(sgd(parallel), microbatches=4)(
        x, num_items_in_batch=16
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_bound_once(bound: list[int], name: str) -> None:
    """Also where it is captured, and where its batch is cut."""
    CALLS[name](autopar.parallelize(Loss(), Mesh(dp=1), "ddp"), torch.randn(8, 4))
    assert bound == [1]


@pytest.mark.parametrize(
    "simulate",
    [lambda parallel: parallel.simulate, lambda parallel: parallel.train_step(sgd(parallel), microbatches=2).simulate],
)
def test_a_simulated_call_is_bound_once(bound: list[int], simulate: Callable[[Any], Any]) -> None:
    simulated, x = simulate(autopar.parallelize(Loss(), Mesh(dp=2), "ddp")), torch.randn(8, 4)
    for count in (1, 2):
        simulated(x, num_items_in_batch=torch.tensor(8))
        assert bound == [count]


ITEMS = [3, 2.5, torch.tensor(3), [3, 4], {"a": torch.tensor(1), "b": [2, torch.tensor(5)]}]
SHARE = torch.tensor(1.5)


@pytest.mark.parametrize("items", ITEMS, ids=str)
@pytest.mark.parametrize("first", [False, True])
def test_another_value_of_a_keyword(items: Any, first: bool) -> None:
    """The same arguments as of a call that is bound with that value."""
    x, others = torch.randn(2, 4), {"mask": (torch.ones(2), "why"), "none": None}

    def call(value: Any) -> Any:
        named = {"num_items_in_batch": value}
        return bind_arguments(Loss(), (x,), {**named, **others} if first else {**others, **named})

    before, after, wanted = call(items), call(items).with_keyword("num_items_in_batch", SHARE), call(SHARE)
    assert str(before.keyword("num_items_in_batch")) == str(items) and before.keyword("num_items") is None
    assert (after.passed, after.names, after.spec, after.whole) == (
        wanted.passed,
        wanted.names,
        wanted.spec,
        wanted.whole,
    )
    assert list(map(id, after.tensors)) == list(map(id, wanted.tensors)) and list(map(id, after.flat)) == list(
        map(id, wanted.flat)
    )


@pytest.mark.simulated
def test_a_copy_keeps_the_layouts_of_its_own_parameters() -> None:
    """A step that splits the parameters of a model splits those of a copy only where the copy is trained so, too."""
    x = torch.randn(4, 4)
    parallel = autopar.parallelize(Loss(), Mesh(dp=2), "ddp")
    copied = copy.deepcopy(parallel)
    whole = parallel.capture(x).program.text()
    parallel.train_step(sgd(parallel), zero=3).capture(x)
    assert parallel.captures == 0, "they were of other layouts"
    split = parallel.capture(x).program.text()
    assert split != whole == copied.capture(x).program.text()
    copied.train_step(sgd(copied), zero=3).capture(x)
    assert copied.capture(x).program.text() == split


def test_attributes_that_are_called_as_parts_of_autopar() -> None:
    """A model keeps its own."""
    model = Loss()
    names = ("_calls", "_compiled", "_latest", "key", "move", "pieces", "given")
    for number, name in enumerate(names):
        setattr(model, name, number)
    parallel = autopar.parallelize(model, Mesh(dp=1))
    parallel(torch.randn(4, 4))
    assert [getattr(model, name) for name in names] == list(range(len(names)))
    assert [getattr(parallel, name) for name in names[1:]] == list(range(1, len(names)))
    parallel.key = 7
    assert model.key == 7
