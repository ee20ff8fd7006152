"""Dims that are merged, taken apart and reordered keep their splits: nothing is sent between what made them and who
reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from casts import promoted_casts  # noqa: F401
from equality import check_equal
from shared_captures import shared_captures  # noqa: F401
from torch import nn
from transformers_models import batch, float64, llama

from autopar import Mesh

MESH = Mesh(dp=2, cp=2, tp=2)
SPLIT = ("dp", "cp", "tp", None)  # batch, sequence, heads, and what a head has


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


# of [batch, sequence, heads, what a head has]; each result keeps all three splits
CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten all but the last": lambda x: x.flatten(0, 2) * 2,
    "batch and sequence as one, and back": lambda x: torch.relu(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
    "heads merged with what they have": lambda x: torch.relu(x.flatten(2)).unflatten(2, x.shape[2:]),
    "all merged": lambda x: torch.relu(x.reshape(-1)).view(x.shape),
    "heads first": lambda x: (
        torch.relu(x.permute(2, 0, 1, 3).flatten(0, 1)).unflatten(0, (x.shape[2], x.shape[0])).permute(1, 2, 0, 3)
    ),
    "transposed and merged": lambda x: x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1], x.shape[3]).exp(),
    "einsum over what a head has": lambda x: torch.einsum("bshd,de->bshe", x, torch.ones(x.shape[3], 3, dtype=x.dtype)),
    "einsum of heads": lambda x: torch.einsum("bshd,bshe->bhsde", x, x),
    "einops' merges": lambda x: torch.einsum("bshd->hbsd", x).reshape(x.shape[2], -1).sin(),
    "size-one dims in between": lambda x: (
        x.unsqueeze(2).flatten(0, 2).unsqueeze(0).squeeze(0).unsqueeze(-1).flatten(-2)
    ),
    "chunks of what a head has": lambda x: torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1),
    "stacked": lambda x: torch.stack([x, -x], -1).flatten(-2),
    "norm over what a head has": lambda x: F.layer_norm(x, x.shape[3:]).flatten(2, 3),
    "linear": lambda x: F.linear(x, torch.ones(5, x.shape[3], dtype=x.dtype)),
    "repeated heads": lambda x: x[:, :, :, None].expand(*x.shape[:3], 2, x.shape[3]).flatten(2, 3).tanh(),
}


SIZES = {"even": (4, 6, 4, 4), "one each": (2, 2, 2, 2), "uneven": (5, 3, 3, 4)}
MERGED = ("all merged", "heads first", "einsum of heads", "size-one dims in between", "repeated heads")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, "uneven") for name in CHAINS),
        *((name, "one each") for name in MERGED),
        ("all merged", "even"),
        *(
            pytest.param(name, size, marks=pytest.mark.sweep("the chain is there with uneven sizes, which need more"))
            for name in CHAINS
            for size in ("even", "one each")
            if not (name in MERGED and size == "one each") and (name, size) != ("all merged", "even")
        ),
    ],
)
def test_chains_send_nothing(name: str, size: str) -> None:
    """But one number, the sum at the end."""
    x = torch.randn(SIZES[size], dtype=torch.float64, requires_grad=True)
    parallel = check_equal(Apply(lambda x: CHAINS[name](x).square().sum()), MESH, {"x": SPLIT}, (x,))
    assert {(row.transfer, row.phase) for row in parallel.transfers if row.bytes} == {("all_reduce", "forward")}, str(
        parallel.program
    )


FUSED: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "(3 -1/tp)": (3, lambda y: sum(y.chunk(3, -1))),
    "(2 -1/tp)": (2, lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]),
}


@pytest.mark.parametrize("features", [8, 6])
@pytest.mark.parametrize("spec", FUSED)
def test_fused_weights_come_apart(spec: str, features: int) -> None:
    """Query, key and value in one weight, and gate and up: a part each on every rank, and one all-reduce after the
    second layer."""
    parts, join = FUSED[spec]

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(5, parts * features), nn.Linear(features, 5, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(join(self.up(x)))

    plan = {"up.weight": (spec, None), "up.bias": (spec,), "down.weight": (None, "tp")}
    for size in (2, 3, 4):
        x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
        parallel = check_equal(Fused().double(), Mesh(tp=size), plan, (x,))
        sent = {(row.phase, row.transfer): row.times for row in parallel.transfers if row.bytes}
        # DTensor has no words for how such a weight lies: it is whole, and its gradient is gathered
        if features % size:
            sent.pop(("backward", "all_gather"))
        assert sent == {("forward", "all_reduce"): 1, ("backward", "all_reduce"): 1}, str(parallel.transfers)


@functools.cache
def grouped(kv: int) -> nn.Module:
    return llama(heads=12, kv=kv, head=2, hidden=12, layers=1)


@pytest.mark.long
@float64
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("kv", "size"),
    [
        (1, 2),  # one head for all ranks
        (2, 4),  # a head for some ranks
        (6, 3),  # some heads for a rank
        (4, 6),  # neither heads nor ranks come apart evenly
        *(pytest.param(kv, size, marks=pytest.mark.sweep("one that divides the other, or not, is above"))
          for kv in (1, 2, 3, 4, 6) for size in (2, 3, 4, 6)
          if (kv, size) not in {(1, 2), (2, 4), (6, 3), (4, 6)}),
    ],
)  # fmt: skip
def test_fewer_key_heads_than_ranks(kv: int, size: int) -> None:
    """Grouped queries: where heads do not come apart evenly, something is gathered, and the numbers are the same."""
    model = grouped(kv)
    model.zero_grad()
    check_equal(model, Mesh(tp=size), "megatron", (), batch(3, 5))
