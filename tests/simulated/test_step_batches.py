"""How the batch of a step is cut into micro-batches, and what a batch is."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from sgd_steps import loops_alike, made, sgd
from steps import Pair
from torch import nn

import autopar
from autopar import Mesh


class Masked(nn.Module):
    """Attention of rows to rows, with a mask that all of the batch share, and where they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.place = nn.Linear(6, 6), nn.Embedding(8, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, places: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.place(places)
        return nn.functional.mse_loss((self.query(x) @ x.transpose(1, 2) + mask).softmax(-1) @ x, y)


def masked(rows: int = 4) -> tuple[torch.Tensor, ...]:
    """As many rows as positions."""
    return (
        torch.randn(rows, rows, 6),
        torch.full((rows, rows), -9.0).triu(1),
        torch.arange(rows),
        torch.randn(rows, rows, 6),
    )


WHOLE = {"*mask": (None, None), "*places": (None,)}
ROWS = {"*.x": ("dp",), "*.y": ("dp",)}
PLANS: list[tuple[Any, dict[str, int]]] = [
    (WHOLE, {"dp": 1}),
    (WHOLE, {"dp": 2}),
    (WHOLE, {"dp": 2, "tp": 2}),
    ({**WHOLE, **ROWS}, {"dp": 1}),
    ({**WHOLE, **ROWS}, {"dp": 2}),
    ([WHOLE, ROWS], {"dp": 2}),
]


@pytest.mark.parametrize(
    ("plan", "sizes", "microbatches"),
    [
        *((*PLANS[k], number) for k, number in [(0, 2), (1, 4), (2, 2), (3, 4), (4, 2), (5, 4)]),
        *(
            pytest.param(*PLANS[k], number, marks=pytest.mark.sweep("the same plan runs with another number of them"))
            for k, number in [(0, 4), (1, 2), (2, 4), (3, 2), (4, 4), (5, 2)]
        ),
    ],
)
def test_what_the_plan_names_whole_is_not_cut(plan: Any, sizes: dict[str, int], microbatches: int) -> None:
    """Though its dim 0 is as long as the batch; and what the plan does not name is split as without it."""
    model, data = Masked(), masked()
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(sizes), plan)
    step = parallel.train_step(sgd(parallel), microbatches=microbatches)
    loops_alike(alone, step, data, step.simulate(*data))
    text = str(step.program.micro)
    assert "mask : f32[4 4] = input" in text
    rows = 4 // microbatches
    assert f"x : f32[{rows}{'/dp' * (sizes['dp'] > 1)} 4 6] = input" in text


@pytest.mark.parametrize(
    "plan",
    [{"scale": (None,), "x": ("dp",), "y": ("dp",)}, {"x": ("dp",), "y": ("dp",)}],
    ids=["all are named", "rows are named"],
)
def test_what_the_plan_splits_over_the_data_axis_is_cut(plan: Any) -> None:
    """Also where it is longer than the batch, and where a tensor that is none of the batch comes first."""

    class Flat(Pair):
        def forward(self, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.predicted(x).flatten(0, 1) * scale, y)

    model, data = Flat(), (torch.rand(8), torch.randn(4, 3, 8), torch.randn(12, 8))
    alone = copy.deepcopy(model)
    parallel = autopar.parallelize(model, Mesh(dp=2), plan)
    step = parallel.train_step(sgd(parallel), microbatches=2)
    loops_alike(alone, step, data, step.simulate(*data))
    with pytest.raises(
        ValueError, match=re.escape("3 micro-batches do not divide a batch of 4 rows (x): use a batch of 3 or 6 rows")
    ):
        parallel.train_step(sgd(parallel), microbatches=3).simulate(*data)
    with pytest.raises(
        ValueError, match=re.escape("4 micro-batches do not divide a batch of 11 rows (y): use a batch of 8 or 12 rows")
    ):
        parallel.train_step(sgd(parallel), microbatches=4).simulate(*data[:2], data[2][:11])


def test_an_input_that_is_called_as_a_parameter_is_not_what_the_plan_names() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return ((x * self.weight).sum(1) * weight).mean()

    model, data = Weighted(), (torch.randn(8, 4), torch.rand(8))
    alone = copy.deepcopy(model)
    step = autopar.parallelize(model, Mesh(dp=2, tp=2), {"weight": ("tp",)}).train_step(sgd(model), microbatches=2)
    loops_alike(alone, step, data, step.simulate(*data))


def test_one_micro_batch_of_two_batches() -> None:
    """The shapes that it has say nothing of what was cut."""

    class Weighted(Pair):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (self.predicted(x).square().mean(1) * w.square().mean()).mean()

    step = made(Weighted(), mesh=Mesh(dp=2), microbatches=2)
    x = torch.randn(8, 8)
    step.simulate(x, torch.rand(4))
    with pytest.warns(UserWarning, match="mixes rows of the batch"):
        step.simulate(x, torch.rand(8))
    assert step.captures == 2


def test_a_plan_that_leaves_nothing_to_cut(data: Any) -> None:
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), {"x": (None,), "*.y": (None, "dp")})
    text = (
        "microbatches=2, but no argument of the step is a tensor with a dim that could be cut, for no axis of the "
        "batch splits dim 0 of x, y in the plan; pass microbatches=1"
    )
    with pytest.raises(ValueError) as caught:
        parallel.train_step(sgd(parallel), microbatches=2).simulate(*data)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("mesh", "end"),
    [(Mesh(dp=2), ""), (Mesh(tp=2), ", on a mesh with an axis for the batch, as dp=1")],
    ids=["dp", "tp"],
)
def test_a_square_tensor_that_is_cut_is_told_once(mesh: Mesh, end: str) -> None:
    step = made(Masked(), mesh=mesh, microbatches=4)
    with pytest.warns(UserWarning) as told:
        step.simulate(*masked())
        step.simulate(*masked())
    assert [str(one.message) for one in told] == [
        "the argument mask, [4, 4], was cut into 4 micro-batches, because its dim 0 is as long as the batch; but so "
        "is its dim 1. "
        f'If dim 0 is not the batch, as in a mask that all rows share, say so in the plan: {{"mask": (None, '
        f"None)}}{end}"
    ]
    assert told[0].filename == __file__


@pytest.mark.parametrize("data", [
    (torch.randn(8, 8), torch.randn(8, 8)),  # as the first
    (torch.randn(8, 4, 8), torch.randn(8, 4, 8)),
    (torch.randn(8, 4, 8), torch.randn(8, 1, 8)),
], ids=["square", "long", "one column"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_rows_that_are_no_mask_are_not_told(data: Any) -> None:
    """No warning is given; pytest turns warnings into errors."""
    made(microbatches=2).capture(*data)


def test_labels_of_another_length_are_refused() -> None:
    """Before the model fails in a micro-batch; a plan may say that they are no part of the batch."""
    x, y = torch.randn(8, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match="y has") as caught:
        made(microbatches=2).simulate(x, y)
    assert str(caught.value) == (
        "y has 4 rows, and the batch has 8 (x), so they cannot be cut into 2 micro-batches alike: give both the same "
        "number of rows; or if dim 0 of y is not the batch, say so in the plan: "
        '{"y": (None, None)}'
    )
    parallel = autopar.parallelize(Pair(), Mesh(dp=1), {"y": (None, None)})
    with pytest.warns(UserWarning, match="the forward mixes rows of the batch"):
        parallel.train_step(sgd(parallel), microbatches=2).simulate(x, y)


def test_an_error_of_the_model_says_how_the_batch_was_cut() -> None:
    step = made(Masked(), mesh=Mesh(dp=2), microbatches=2)
    with pytest.warns(UserWarning, match="the argument mask"), pytest.raises(RuntimeError, match="broadcast") as caught:
        step.simulate(*masked())
    assert caught.value.__notes__[-1] == (
        "autopar cut the batch into 2 micro-batches, in each of which x has 2 of 4 rows, mask has 2 of 4 rows, places "
        "has 2 of 4 rows, y has 2 of 4 rows\n"
        '  if dim 0 of places is not the batch, say so in the plan: {"places": (None,)}'
    )


# -- a batch that is one argument --------------------------------------------------------------------------------------


class OfPair(Pair):
    def forward(self, pair: Any) -> torch.Tensor:
        return super().forward(*pair)


class OfPairAndScale(Pair):
    def forward(self, pair: Any, scale: float = 1.0) -> torch.Tensor:
        return super().forward(*pair[:2]) * scale


class OfMany(Pair):
    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return super().forward(x, *more)


@pytest.mark.parametrize(("model", "batch"), [
    (OfPair, lambda x, y: (x, y)),
    (OfPair, lambda x, y: [x, y]),
    (OfPair, lambda x, y: ((x, y),)),  # its parts, of which there is one
    (OfPairAndScale, lambda x, y: (x, y, x)),
    (OfPairAndScale, lambda x, y: ((x, y), 1.0)),
    (OfMany, lambda x, y: (x, y)),
    (Pair, lambda x, y: (x, y)),
])  # fmt: skip
def test_a_forward_of_one_tuple_or_list_gets_it_whole(model: type[Pair], batch: Any, data: Any) -> None:
    """Where it has more parts than forward takes arguments."""
    one = model()
    wanted = Pair.forward(one, *data).detach()
    torch.testing.assert_close(made(one, microbatches=2).simulate(batch(*data)), wanted)
