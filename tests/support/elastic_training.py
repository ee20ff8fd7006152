"""Train in a loop of one's own that goes on after a loss. A test holds it at a step or within a save, and kills a host.

The number of each step and its loss go to standard output, once a host. ``hold-STEP`` in the folder given holds the
loop before that step, ``hold-save`` the next save, before the checkpoint is complete.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

ROWS, FEATURES, STEPS, EVERY = 16, 8, 20, 5
LAST_HOLD = "holds"  # a file that says where the job is held


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(FEATURES, 16), torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


PLAN = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
MESHES = ("dp=2,tp=2", "tp=2")


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches() -> list[torch.Tensor]:
    """Seven, so that a pass over them ends between two checkpoints."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, FEATURES, generator=generator) for _ in range(7)]


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)


def alone(steps: int = STEPS) -> list[float]:
    """The losses of a single device, in plain PyTorch."""
    single, losses = model(), []
    optimizer = torch.optim.AdamW(single.parameters(), lr=1e-2)
    schedule, data = schedule_of(optimizer), batches()
    for k in range(steps):
        loss = single(data[k % len(data)])
        loss.backward()
        optimizer.step(), optimizer.zero_grad(), schedule.step()
        losses.append(loss.item())
    return losses


def _hold(folder: Path, name: str) -> None:
    """Wait. The first rank says it: then it has noted the steps before."""
    while (folder / name).exists():
        if os.environ["RANK"] == "0":
            (folder / LAST_HOLD).write_text(name)
        time.sleep(0.01)


def _held_saves(folder: Path) -> None:
    """Hold a save when the tensors are written and the folder is not renamed yet."""
    from autopar.checkpoint import files

    rename = files.rename

    def held(old: Path, new: Path) -> None:
        if new.name.startswith("checkpoint-"):
            _hold(folder, "hold-save")
        rename(old, new)

    files.rename = held


def main() -> None:
    import autopar

    folder = Path(sys.argv[1])
    _held_saves(folder)
    chosen = autopar.elastic.choose(*MESHES, global_batch=ROWS, micro_batch=8)
    parallel = autopar.parallelize(model(), chosen.mesh, PLAN)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step, schedule = parallel.train_step(optimizer, microbatches=chosen.microbatches), schedule_of(optimizer)
    left = autopar.elastic.batches(
        folder / "saved", step, batches(), steps=STEPS, every=EVERY, states={"schedule": schedule}
    )
    for batch in left:
        _hold(folder, f"hold-{step.steps + 1}")
        loss = step(batch)
        schedule.step()
        if os.environ["LOCAL_RANK"] == "0":
            print(f"step {step.steps} of {os.environ['WORLD_SIZE']} ranks: {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
