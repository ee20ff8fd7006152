"""Train a module with ``training_step`` and ``configure_optimizers``, as Lightning has them; Lightning is not needed.

    python -m autopar.examples.lightning_style
    torchrun --nproc-per-node 4 -m autopar.examples.lightning_style

``fit`` is the part of a Lightning Trainer that changes: autopar captures ``training_step`` as the forward of the step,
and compiles it with the backward and the optimizer of ``configure_optimizers``.
"""

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import autopar
from autopar.examples.on_ranks import compare, is_first, on_ranks

MESH = autopar.Mesh(dp=2, tp=2)
PLAN = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}
Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(nn.Module):
    """A module as it is written for Lightning, whose LightningModule would be the base class."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def training_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        x, labels = batch
        return cross_entropy(self(x), labels)

    def validation_step(self, batch: Batch, batch_index: int) -> torch.Tensor:
        return self.training_step(batch, batch_index)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


class Steps(nn.Module):
    """The steps of a module as one forward: a training step in training, else a validation step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.task = module

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        step = self.task.training_step if self.training else self.task.validation_step
        return step(batch, 0)


def fit(module: Classifier, train: list[Batch], validation: list[Batch], folder: str) -> list[float]:
    """Train on the mesh; return the losses, and that of the validation."""
    parallel = autopar.parallelize(Steps(module), MESH, PLAN)
    optimizer, schedule = parallel.task.configure_optimizers()  # its parameters are those on the mesh
    step = parallel.train_step(optimizer, microbatches=2, clip_norm=1.0)
    losses = []
    for batch in train:
        losses.append(step(*batch).item())
        autopar.log(folder, step, loss=losses[-1])  # and tokens a second, MFU, memory, lr, gradient norm
        schedule.step()
    parallel.eval()
    with torch.no_grad():
        losses.append(sum(parallel(*batch).item() for batch in validation) / len(validation))
    parallel.close()
    return losses


def fit_alone(module: Classifier, train: list[Batch], validation: list[Batch]) -> list[float]:
    optimizer, schedule = module.configure_optimizers()
    losses = []
    for k, batch in enumerate(train):
        loss = module.training_step(batch, k)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, sum(module.validation_step(b, k).item() for k, b in enumerate(validation)) / len(validation)]


def module() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def batches(count: int, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(8, 16, generator=generator) for _ in range(count)]
    return [(x, x[:, :4].argmax(-1)) for x in rows]


def main() -> None:
    train, validation = batches(5, 1), batches(2, 2)
    with tempfile.TemporaryDirectory() as folder:
        ours = fit(module(), train, validation, folder)
    if is_first():
        names = [*(f"step {k}" for k in range(1, len(ours))), "validation"]
        compare("loss", ours, fit_alone(module(), train, validation), names)


if __name__ == "__main__":
    on_ranks(main)
