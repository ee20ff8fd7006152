"""What torch and Accelerate put around a model that is on a mesh, on ranks."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from checkpoints import told
from models import Block
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import autopar


def accelerated(parallel: nn.Module) -> Any:
    from accelerate import Accelerator

    rank = str(distributed.get_rank())
    told_by_torchrun = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": str(distributed.get_world_size()),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    with mock.patch.dict(os.environ, told_by_torchrun):
        return Accelerator(cpu=True).prepare(parallel)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DistributedDataParallel": lambda parallel: nn.parallel.DistributedDataParallel(parallel),
    "Accelerate": lambda parallel: accelerated(parallel),
    "fully_shard": lambda parallel: fully_shard(parallel),
    "parallelize": lambda parallel: autopar.parallelize(parallel, parallel.mesh),
    "torch.save": lambda parallel: torch.save(parallel, "/dev/null"),
}


def refused() -> dict[str, str]:
    """The error of each; the model is as before afterwards."""
    torch.manual_seed(1)
    parallel, x = autopar.parallelize(Block(), autopar.Mesh(dp=2)), torch.randn(4, 8)
    before = parallel(x).full_tensor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Accelerate
        errors = {name: ": ".join(told(lambda wrap=wrap: wrap(parallel))) for name, wrap in WRAPPERS.items()}
    assert not [key for key in vars(parallel) if key.startswith("__")]
    assert torch.equal(parallel(x).full_tensor(), before)
    copied = copy.deepcopy(parallel)
    assert torch.equal(copied(x).full_tensor(), before) and copied.up.weight is not parallel.up.weight
    return errors
