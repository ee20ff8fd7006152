"""On a rank: train on the rows of sharded loaders, beside one device."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Numbered, Shuffled, Unseeded
from equality import TOLERANCE, relative
from error_texts import refused
from torch import distributed, nn

import autopar
from autopar import Mesh
from autopar.data import sharded

ROWS, SIZE = 13, 6  # batches of 6, 6 and 1: one rank of two along dp has no row of the last


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.relu(self.up(x))).squeeze(1) - k).square().mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Regression().double()


def inputs_of(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("x", "k")}


def trains_as_one_device(inputs: Any, whole_step: bool) -> None:
    """Two epochs with a last batch of one row; the position goes into a loader for one device in between."""
    mesh = Mesh(dp=2, tp=2)
    plan = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
    single, parallel = model(), autopar.parallelize(model(), mesh, plan, inputs=inputs)
    loader = sharded(Numbered(ROWS), parallel, SIZE, shuffle=True)
    alone = sharded(Numbered(ROWS), Mesh(dp=1), SIZE, shuffle=True, rank=0)
    theirs = torch.optim.SGD(single.parameters(), 1e-3)
    ours = torch.optim.SGD(parallel.parameters(), 1e-3)
    step = parallel.train_step(ours)
    for _ in range(2):
        taken = 0
        for batch, whole in zip(loader, alone, strict=True):
            wanted = single(**inputs_of(whole))
            theirs.zero_grad()
            wanted.backward()
            theirs.step()
            if whole_step:
                loss = step(**inputs_of(batch))
            else:
                loss = parallel(**inputs_of(batch))
                ours.zero_grad()
                loss.backward()
                ours.step()
            assert relative(torch.as_tensor(loss), wanted) <= TOLERANCE
            assert loader.state_dict() == alone.state_dict()
            taken += 1
        assert taken == 3
    for (name, a), b in zip(parallel.named_parameters(), single.parameters(), strict=True):
        assert relative(a.full_tensor(), b) <= TOLERANCE, name


def refuses_ranks_that_differ() -> None:
    rank = distributed.get_rank()
    parallel = autopar.parallelize(model(), Mesh(dp=2, tp=2), inputs="local")
    loader = sharded(Numbered(9 + rank // 3), parallel, 4, shuffle=True)
    text = refused(RuntimeError, lambda: next(iter(loader)))
    assert text.startswith("the ranks make different calls"), text
    said = "rows in batches of 4, shuffled with seed 0, from row 0 of epoch 0 on"
    assert f"ranks 0 1 2: iterate over 9 {said}" in text and f"rank 3: iterate over 10 {said}" in text, text


def refuses_streams_that_differ() -> None:
    parallel = autopar.parallelize(model(), Mesh(dp=2, tp=2), inputs="local")
    assert len([*sharded(Shuffled(16), parallel, 4)]) == 4  # by the global generators, which are seeded
    text = refused(RuntimeError, lambda: next(iter(sharded(Unseeded(16, distributed.get_rank()), parallel, 4))))
    assert text.startswith("the ranks make different calls") and "take batch 1 of a stream" in text, text
    assert "so it must have one order on all ranks" in text, text


def takes_a_mesh_of_the_job() -> None:
    rank = distributed.get_rank()
    rows = [batch["k"].tolist() for batch in sharded(Numbered(4), Mesh(dp=4), 4)]
    assert rows == [[rank]]
