"""An index that is out of range is an error that names the line of the program, the user's line and the argument:
simulated as on a process."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.table(ids[:, :-1]))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def notes(call: Any, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    return "\n".join(caught.value.__notes__)


CALLS: dict[str, Any] = {
    "simulate": lambda parallel, batch: parallel.simulate(*batch),
    "a simulated step": lambda parallel, batch: parallel.train_step(torch.optim.SGD(parallel.parameters())).simulate(
        *batch
    ),
    "a call": lambda parallel, batch: parallel(*batch),
    "a step": lambda parallel, batch: parallel.train_step(torch.optim.SGD(parallel.parameters()))(*batch),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_index(name: str) -> None:
    parallel = autopar.parallelize(Tagger(), Mesh(dp=2 if "simulate" in name else 1), "ddp")
    ids, labels = torch.randint(7, (4, 6)), torch.randint(5, (4, 6))
    labels[0, 2] = -100
    CALLS[name](parallel, (ids, labels))  # labels to ignore are none
    rank = "on rank 0: " if "simulate" in name else ""
    bad = ids.clone()
    bad[0, 1] = 9
    told = notes(lambda: CALLS[name](parallel, (bad, labels)), IndexError)
    assert told.startswith(f"while autopar ran\n    {rank}embedding : ") and " = embedding(table_weight, " in told
    assert "test_bad_ids.py:" in told and "self.table(ids[:, :-1])" in told and "in module table   of ids" in told
    worse = labels.clone()
    worse[0, 1] = 6
    told = notes(lambda: CALLS[name](parallel, (ids, worse)), IndexError)
    assert "nll_loss" in told and "cross_entropy(" in told and told.endswith("   of labels")
