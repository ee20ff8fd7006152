"""A model that is on a mesh is not wrapped once more: each error names the line and the remedy, and the model is as
before."""

from __future__ import annotations

from pathlib import Path

import models_wrapped
import pytest
import torch
from models import Block
from processes import ranks

import autopar

DDP = (
    "TypeError: DistributedDataParallel cannot wrap a model that is on a mesh: autopar averages its gradients over "
    "the processes already; call the model as it is\n"
    "    {line}\n  with Accelerate, leave the model and its optimizer out of accelerator.prepare(…)"
)
ERRORS = {
    "DistributedDataParallel": DDP.format(
        line='models_wrapped.py:{}  "DistributedDataParallel": lambda parallel: '
        "nn.parallel.DistributedDataParallel(parallel),"
    ),
    "Accelerate": DDP.format(line="models_wrapped.py:{}  return Accelerator(cpu=True).prepare(parallel)"),
    "fully_shard": (
        "TypeError: fully_shard cannot be put on a model that is on a mesh: its parameters are DTensors that autopar "
        "has cut already; for parameters, gradients and the optimizer's state that are split over the data axis, use "
        "parallel.train_step(optimizer, zero=3)\n"
        '    models_wrapped.py:{}  "fully_shard": lambda parallel: fully_shard(parallel),'
    ),
    "parallelize": "TypeError: parallelize takes the model itself, and this one is on a mesh already; pass the model "
    "that was given to parallelize",
    "torch.save": "TypeError: a model on a mesh is sharded over its processes and cannot be pickled; save its "
    "state_dict()",
}


def test_what_wraps_a_model_on_a_mesh() -> None:
    lines = [line.strip() for line in Path(models_wrapped.__file__).read_text().splitlines()]
    every = ranks(2).run(models_wrapped.refused)
    assert every[0] == every[1] and set(every[0]) == set(ERRORS)
    for name, error in every[0].items():
        quoted = ERRORS[name].partition("models_wrapped.py:{}  ")[2].partition("\n")[0]
        assert error == ERRORS[name].replace("{}", str(lines.index(quoted) + 1) if quoted else "{}"), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_call_that_is_traced() -> None:
    parallel = autopar.parallelize(Block(), autopar.Mesh(dp=1))
    text = (
        "torch.compile and torch.export cannot take a model that is on a mesh: its step is a captured program "
        "already, which runs as it is; call the model as it is, and pass compile=True to parallelize to compile it"
    )
    with pytest.raises(TypeError, match=f"^{text}$"):
        torch.export.export(parallel, (torch.randn(4, 8),))
