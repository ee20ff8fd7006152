"""Train models on processes with loops and optimizers of torch, on each rank."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import torch
from calls_of_models import MESH
from equality import TOLERANCE, relative
from error_texts import refused
from loops import text, whole
from models import COLUMN_ROW, Block
from torch import nn
from transformers_models import llama

import autopar
from autopar import Mesh


def many_steps(count: int) -> tuple[int, int]:
    """How many more tensors, and bytes of this process, there are after ``count`` steps than after a tenth of them."""
    model = Block(256, 512)
    parallel = autopar.parallelize(model, MESH, COLUMN_ROW)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(64, 256)
    seen = []
    for step in range(count):
        loss = parallel(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (count // 10, count - 1):
            gc.collect()
            tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            seen.append((tensors, int(Path("/proc/self/statm").read_text().split()[1]) * 4096))
    (tensors, bytes_), (more, grown) = seen
    return more - tensors, grown - bytes_


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of three batches."""

    def __init__(self) -> None:
        self.batches = [text(step) for step in range(3)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {name: tensor[row % 4] for name, tensor in self.batches[row // 4].items()}


def readme_loop(code: str) -> None:
    """The loop that the README shows, for a Llama: its losses are the single-device loop's."""
    torch.manual_seed(0)
    model = llama()
    eager = copy.deepcopy(model)
    scope: dict[str, Any] = {"autopar": autopar, "torch": torch, "MyModel": lambda: model, "dataset": Rows()}
    exec(code.replace("batch_size=64", "batch_size=4"), scope)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    for batch in autopar.data.sharded(Rows(), Mesh(dp=1), batch_size=4):
        loss = eager(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert relative(scope["loss"], loss) <= 1e-6


class Turned(nn.Module):
    """The gradient of its weight comes out transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.t().contiguous() * x.mean()


def fused_optimizer() -> None:
    """Reads parameters and gradients as they lie in memory; copies of a model are models."""
    torch.manual_seed(0)
    model = Turned()
    eager, x = copy.deepcopy(model), torch.randn(4, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, Mesh(tp=4), {"weight": (None, "tp")})
    average = torch.optim.swa_utils.AveragedModel(parallel)
    wanted = torch.optim.swa_utils.AveragedModel(eager)
    for run, mean in ((parallel, average), (eager, wanted)):
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            whole(run(x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(run)
    assert relative(whole(parallel.weight), eager.weight) <= TOLERANCE
    assert relative(whole(average(x)), wanted(x)) <= TOLERANCE
    assert "save its state_dict()" in refused(TypeError, lambda: torch.save(parallel, "/dev/null"))
