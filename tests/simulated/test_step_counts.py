"""Micro-batches with unequal numbers of tokens: the loss and the gradients are those of the mean over the whole
batch."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar import Mesh


class Scores(nn.Module):
    """A classifier with a loss of its own."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 5), loss
        self.register_buffer("weight", torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), y, self.weight)


def masked(scores: torch.Tensor, y: torch.Tensor, at_least: float | None = None) -> torch.Tensor:
    """A mean over what is not ignored, as people write it."""
    own = (y != -100).to(scores.dtype)
    total = (F.cross_entropy(scores, y, reduction="none") * own).sum()
    count = own.sum()
    return total / (count if at_least is None else count.clamp(min=at_least))


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda z, y, w: F.cross_entropy(z, y),
    "class weights": lambda z, y, w: F.cross_entropy(z, y, w),
    "smoothed": lambda z, y, w: F.cross_entropy(z, y, label_smoothing=0.1),
    "smoothed weights": lambda z, y, w: F.cross_entropy(z, y, w, label_smoothing=0.2),
    "masked": lambda z, y, w: masked(z, y),
    "masked at least": lambda z, y, w: masked(z, y, 1.0),
    "integer count": lambda z, y, w: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum(),
    "two terms": lambda z, y, w: F.cross_entropy(z, y) + 0.01 * z.square().mean(),
    "difference": lambda z, y, w: 2 * F.cross_entropy(z, y) - F.cross_entropy(z, y, w),
    "plain mean": lambda z, y, w: z.square().mean(),
}

COUNTED = {
    name: 2 if name in ("smoothed", "smoothed weights", "difference") else 0 if name == "plain mean" else 1
    for name in LOSSES
}


def labels(kept: list[bool]) -> torch.Tensor:
    y = torch.arange(len(kept)) % 5
    y[~torch.tensor(kept)] = -100
    return y


def step_and_oracle(loss: Callable[..., torch.Tensor], kept: list[bool], mesh: Mesh, microbatches: int) -> Any:
    """The loss and the gradients of a step with SGD at rate one, and of the whole batch."""
    torch.manual_seed(0)
    model = Scores(loss).double()
    alone = copy.deepcopy(model)
    x, y = torch.randn(len(kept), 4, dtype=torch.float64), labels(kept)
    parallel = autopar.parallelize(model, mesh, {"*.linear.weight": ("tp", None)} if "tp" in mesh.sizes else "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=microbatches)
    ours = step.simulate(x, y)
    expected = alone(x, y)
    expected.backward()
    gradients = [(b - a, b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True)]
    return step, [(ours, expected), *gradients]


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=3, phases=[Phase.explicit, Phase.generate])  # a failing case needs no shrinking
@given(data=st.data())
def test_losses(name: str, data: st.DataObject) -> None:
    """Some micro-batch may have no token at all; the batch has one."""
    sizes = data.draw(st.sampled_from([{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 4}]))
    microbatches = data.draw(st.sampled_from([2, 3, 4]))
    kept = data.draw(st.lists(st.booleans(), min_size=4 * microbatches, max_size=4 * microbatches))
    kept[data.draw(st.integers(0, len(kept) - 1))] = True
    step, pairs = step_and_oracle(LOSSES[name], kept, Mesh(sizes), microbatches)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-10, atol=1e-12)
    inputs = step.program.micro.text().count("= input('.count.")
    assert inputs == COUNTED[name]
    if "tp" not in sizes:
        assert "all_reduce(" not in step.program.micro.text(), (
            "terms are added before they are reduced, with the gradients"
        )


def test_a_penalty_of_weights_is_alike_in_all_micro_batches() -> None:
    """It is told by nobody, and neither it nor its gradient makes the others' be reduced before their time."""

    class Penalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.linear(x), y) + 0.1 * self.linear.weight.square().sum()

    torch.manual_seed(0)
    model = Penalized().double()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=2)
    x, y = torch.randn(8, 4, dtype=torch.float64), labels([True, False] * 4)
    ours, expected = step.simulate(x, y), alone(x, y)
    expected.backward()
    torch.testing.assert_close(ours, expected.detach())
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(b - a, b.grad)
    text = step.program.micro.text()
    assert "all_reduce(" not in text and text.count("= pend(") == 2


def test_what_is_no_mean_is_averaged_and_told() -> None:
    """A term that is no sum over tokens has the same say in each micro-batch."""
    with pytest.warns(UserWarning, match="the loss is the unweighted mean of the losses of the micro-batches"):
        step, pairs = step_and_oracle(
            lambda z, y, w: F.cross_entropy(z, y) + z.square().sum().sqrt(), [True] * 8, Mesh(dp=2), 2
        )
    assert abs(pairs[0][0] - pairs[0][1]) > 1e-3
    (note,) = [note for report in step.reports for note in report.notes if "micro-batch" in note]
    assert (
        note.startswith("the loss is the unweighted mean of the losses of the micro-batches")
        and "test_step_counts.py" in note
    )


class Rooted(torch.nn.Module):
    """Its loss is no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh()).square().sum().sqrt()


@pytest.mark.parametrize(("sizes", "options"), [({"dp": 2}, {}), ({"pp": 2}, {"schedule": "1f1b"})], ids=str)
@pytest.mark.parametrize("call", ["capture", "simulate"])
def test_the_warning_is_at_the_line_of_the_user(sizes: dict[str, int], options: dict[str, Any], call: str) -> None:
    parallel = autopar.parallelize(Rooted(), Mesh(sizes), "ddp" if "dp" in sizes else {})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=2, **options)
    with pytest.warns(UserWarning, match="the loss is the unweighted mean of the losses of the micro-batches") as told:
        getattr(step, call)(torch.randn(8, 4))
    (warning,) = told
    assert warning.filename == __file__
    assert "getattr(step, call)" in linecache.getline(__file__, warning.lineno)


@pytest.mark.parametrize("items", [11, torch.tensor(11), torch.tensor(11.0)], ids=str)
def test_num_items_in_batch(items: Any) -> None:
    """What Hugging Face's trainer hands over counts all micro-batches."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor, y: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            return F.cross_entropy(self.linear(x), y, reduction="sum") / num_items_in_batch

    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=1.0), microbatches=3)
    x, y = torch.randn(12, 4), labels([True] * 4 + [False] + [True] * 7)
    ours, expected = step.simulate(x, y, num_items_in_batch=items), alone(x, y, items)
    expected.backward()
    torch.testing.assert_close(ours, expected.detach())
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(b - a, b.grad)
    step.simulate(x, y, num_items_in_batch=items + 1)
    assert step.captures == 1


def test_a_whole_batch_without_a_token_is_nan_as_in_eager() -> None:
    _, pairs = step_and_oracle(LOSSES["mean"], [False] * 8, Mesh(dp=2), 2)
    assert all(ours.isnan().all() == expected.isnan().all() for ours, expected in pairs)
