"""Texts of different lengths that are packed into rows: tokens see only their own text, on the mesh too."""

from __future__ import annotations

import copy

import pytest
import torch
from equality import TOLERANCE, relative
from torch import nn
from torch.nn import functional
from transformers_models import batch, float64, llama, promoted_casts  # noqa: F401

import autopar
from autopar import Mesh

LENGTH = 12


def positions(*rows: tuple[int, ...]) -> torch.Tensor:
    """The positions of rows that hold texts of these lengths: each text begins at 0."""
    return torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])


@float64
@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(cp=2, tp=2)], ids=str)
def test_rows_of_a_transformer_hold_several_texts(mesh: Mesh) -> None:
    """Other lengths, which only the values of the positions say, need no new capture."""
    torch.manual_seed(0)
    model = llama()
    plain, given = copy.deepcopy(model), batch(4, LENGTH)
    parallel = autopar.parallelize(model, mesh, "megatron")
    losses = []
    for packed in (positions((5, 7), (12,), (4, 4, 4), (1, 11)), positions((6, 6), (10, 2), (12,), (3, 9))):
        model.zero_grad()
        plain.zero_grad()
        ours = parallel.simulate(**given, position_ids=packed)
        theirs = plain(**given, position_ids=packed)
        ours.loss.backward()
        theirs.loss.backward()
        assert relative(ours.logits, theirs.logits) < TOLERANCE
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert relative(parameter.grad, other.grad) < TOLERANCE, name
        losses.append(theirs.loss.item())
    assert parallel.captures == 1
    apart = [*losses, plain(**given).loss.item()]  # the texts of a row do not see each other
    assert len({round(loss, 6) for loss in apart}) == 3


class Packed(nn.Module):
    """Attention of one long row, whose texts begin where ``starts`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        length = x.shape[0]
        q, k, v = (part.view(length, 2, 4).transpose(0, 1) for part in self.qkv(x).chunk(3, -1))
        text = torch.bucketize(torch.arange(length), starts, right=True)
        seen = (text[:, None] == text[None]) & torch.ones(length, length, dtype=torch.bool).tril()
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(0, 1).reshape(length, 8))


def test_one_row_holds_all_texts() -> None:
    torch.manual_seed(0)
    model, x = Packed().double(), torch.randn(16, 8, dtype=torch.float64)
    parallel = autopar.parallelize(model, Mesh(cp=2, tp=2), {"qkv.weight": ("tp", None), "out.weight": (None, "tp")})
    for starts in (torch.tensor([0, 3, 9]), torch.tensor([0, 5, 11])):
        assert relative(parallel.simulate(x, starts), model(x, starts)) < TOLERANCE
    assert parallel.captures == 1
