"""Axes whose names have a meaning: ``cp`` splits the sequence, and experts stay on ``ep`` while tokens travel."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from casts import promoted_casts  # noqa: F401
from equality import check_equal
from shared_captures import shared_captures  # noqa: F401
from torch import nn
from transformers_models import batch, float64, llama

import autopar
from autopar import Mesh


class Experts(nn.Module):
    """A mixture with a capacity (GShard, arXiv:2006.16668): each token goes to a place of its expert, and comes back
    weighted."""

    def __init__(self, dim: int, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, dim))
        self.capacity = capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(choice, len(self.up))
        place = (chosen.cumsum(1) - 1) * chosen
        kept = chosen * (place < self.capacity)
        dispatch = (kept.unsqueeze(-1) * F.one_hot(place * kept, self.capacity)).to(x.dtype)
        tokens = torch.einsum("gnec,gnd->egcd", dispatch, x)
        hidden = torch.relu(torch.einsum("egcd,edh->egch", tokens, self.up))
        done = torch.einsum("egch,ehd->egcd", hidden, self.down)
        return torch.einsum("gnec,egcd->gnd", dispatch * weight[..., None, None], done)


PLAN = {"up": ("ep", None, None), "down": ("ep", None, None)}


@functools.cache
def experts() -> nn.Module:
    return Experts(8, 12, 4, 3).double()


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("mesh", [Mesh(ep=2), Mesh(ep=4), Mesh(dp=2, ep=2), Mesh(dp=2, ep=2, tp=2)], ids=str)
def test_tokens_travel_to_experts(mesh: Mesh) -> None:
    """The batch is split over dp and ep; experts are never gathered, and their gradients are not reduced over ep."""
    x = torch.randn(8, 6, 8, dtype=torch.float64, requires_grad=True)
    model = experts()
    model.zero_grad()
    parallel = check_equal(model, mesh, PLAN, (x,))
    over = [row for row in parallel.transfers if "ep" in row.axis.split("×") and row.bytes]
    assert {row.transfer for row in over} == {"all_to_all", "all_reduce"}, str(parallel.transfers)
    assert [row.module for row in over if row.transfer == "all_reduce"] == ["router"]
    assert sum(row.times for row in over if row.transfer == "all_to_all" and row.phase == "forward") == 2


def test_experts_and_batches_that_do_not_divide() -> None:
    x = torch.randn(5, 7, 8, dtype=torch.float64, requires_grad=True)
    check_equal(Experts(8, 12, 3, 2).double(), Mesh(dp=2, ep=2), PLAN, (x,))


SEQUENCES = {("all_gather", "forward"): 2, ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 2}


@functools.cache
def layers(count: int) -> nn.Module:
    return llama(kv=2, layers=count)


@pytest.mark.long
@float64
@pytest.mark.usefixtures("shared_captures")
def test_what_splits_by_default() -> None:
    parallel = autopar.parallelize(layers(1), Mesh(dp=2, cp=2, ep=2), "ddp", example=batch())
    assert "input_ids : i64[4/dp/ep 6/cp] = input" in str(parallel.program)
    assert "dp and ep split dim 0 of the inputs input_ids, labels (the batch, 4); cp splits dim 1" in str(
        parallel.reports
    )


@pytest.mark.long
@float64
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(cp=3),
        Mesh(dp=2, cp=2, tp=2),
        pytest.param(Mesh(cp=2), marks=pytest.mark.sweep("cp=2 is there beside dp and tp")),
    ],
    ids=str,
)
def test_a_layer_gathers_its_keys_and_values(mesh: Mesh) -> None:
    """And nothing else over cp but what the loss needs of its neighbours' labels; their gradients are scattered."""
    counts = []
    for count in (1, 2):
        model = layers(count)
        model.zero_grad()
        parallel = check_equal(model, mesh, None, (), batch())
        found: dict[tuple[str, str], int] = {}
        for row in parallel.transfers:
            if row.axis == "cp" and row.bytes:
                found[row.transfer, row.phase] = found.get((row.transfer, row.phase), 0) + row.times
        counts.append(found)
    one, two = counts
    layer = {key: two[key] - one.get(key, 0) for key in two}
    assert {key: count for key, count in layer.items() if count and key[0] != "all_reduce"} == SEQUENCES, str(
        parallel.transfers
    )
