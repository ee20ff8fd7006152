"""On real processes: one file for one device, and files of pieces."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
from first_steps import warned
from torch import distributed, nn

import autopar
from autopar import Mesh

SAID = (
    "files_of_states.py: this writes the pieces that this rank has of the parameters, and a file of one rank has no "
    "others; torch.save(parallel.full_state_dict(), path) on the first rank writes whole tensors, which a model on one "
    "device loads, and autopar.checkpoint.save(folder, state) writes the pieces of all ranks, which any mesh loads"
)
PLAN = {"0.weight": ("tp", None), "0.bias": ("tp",), "2.weight": (None, "tp")}


class Tied(nn.Sequential):
    """The last weight is the first, and a buffer is not trained."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, 6))
        self[3].weight = self[0].weight


def written(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"model": state}, file)
    file.seek(0)
    return file


def one_file(sizes: dict[str, int]) -> bool:
    """A model on one device loads it, strictly, with the values and the tied weight."""
    model = Tied()
    parallel = autopar.parallelize(model, Mesh(sizes), PLAN if "tp" in sizes else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = parallel.full_state_dict()
        if distributed.get_rank() != 0:
            return state == {}
        loaded = torch.load(written(state))["model"]
    other = Tied()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(loaded)
    assert loaded["0.weight"].data_ptr() == loaded["3.weight"].data_ptr()
    return all(torch.equal(p, q) for p, q in zip(other.state_dict().values(), model.state_dict().values(), strict=True))


def pieces() -> list[list[str]]:
    """Warnings of a file of pieces, of copies, and of whole values."""
    parallel = autopar.parallelize(Tied(), Mesh(tp=2), PLAN)
    state = parallel.state_dict()
    assert isinstance(state, dict) and list(state) == list(Tied().state_dict())
    whole = autopar.parallelize(Tied(), Mesh(dp=2), "ddp").state_dict()
    said = [warned(written, state)[0], warned(copy.deepcopy, state)[0], warned(dict, state)[0]]
    said += [warned(parallel.load_state_dict, state)[0], warned(written, whole)[0]]
    return said
